"""One matrix per group of rows by torch_npu's npu_grouped_matmul, over a weight tensor's pages.

The operator skips groups without rows before it loads a weight, so experts that are not there may
stay unmapped (ExpertWeave, section 4.2). Weights stay as they lie: a cast to another storage format
would read the padding.
"""

import importlib
from types import ModuleType

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import Tensor

from lora_jax.memory.weight_tensor import WeightTensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GROUPS = 1024  # of one weight given as a tensor
INNER_LIMIT = 65536  # of the axis that is summed over
PLAIN_FORMAT = 2  # ND
_TORCH_DTYPES = {
    np.dtype(np.float16): torch.float16,
    np.dtype(bfloat16): torch.bfloat16,
    np.dtype(np.float32): torch.float32,
}


def weight_view(weights: WeightTensor, device: torch.device) -> Tensor:
    """Return the whole tensor [experts_total, d_out, d_in] on the NPU it lies on; it owns nothing.

    Only mapped experts may be read. The caller drops the view before closing the tensor.

    Raises:
        ValueError: a dtype that the operator has not.
        NotImplementedError: there is no torch_npu with its constructors of foreign memory.
    """
    dtype = _TORCH_DTYPES.get(weights.dtype)
    if dtype is None:
        raise ValueError(f"grouped_matmul: weights {weights.dtype} are none of {_names(DTYPES)}")
    experts, d_out, d_in = weights.shape
    size = experts * weights.expert_bytes
    inside = _torch_npu()._C
    try:
        storage_of = inside._construct_storage_from_data_pointer
        tensor_of = inside._construct_NPU_Tensor_From_Storage_And_Metadata
    except AttributeError as error:  # private names
        raise NotImplementedError(f"this torch_npu takes no foreign memory: {error}") from error
    about = {
        "data_ptr": weights.address,
        "device": device,
        "nbytes": size,
        "dtype": dtype,
        "size": (experts, d_out, d_in),
        "stride": (d_out * d_in, d_in, 1),
        "storage_offset": 0,
        "npu_format": PLAIN_FORMAT,
    }
    return tensor_of(about, storage_of(weights.address, device, size))


def grouped_matmul(x: Tensor, w: Tensor, group_sizes: Tensor) -> Tensor:
    """y[t] = w[g] @ x[t] for rows sorted by group, y of x's dtype.

    x [rows, d_in], w [groups, d_out, d_in], group_sizes int64 [groups], all on one device. Rows at
    or after sum(group_sizes) give exactly 0.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: beyond the operator's limits, or there is no torch_npu.
    """
    return _zero_rest(_multiply(x, w, group_sizes), group_sizes)


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, group_sizes: Tensor) -> Tensor:
    """y[t] = down[g] @ (silu(gate[g] @ x[t]) * (up[g] @ x[t])): the experts of one layer.

    gate_up [groups, 2 * width, d_in] holds gate above up, down is [groups, d_out, width]; otherwise
    as `grouped_matmul`.
    """
    hidden = _torch_npu().npu_swiglu(_multiply(x, gate_up, group_sizes))
    return _zero_rest(_multiply(hidden, down, group_sizes), group_sizes)


def _multiply(x: Tensor, w: Tensor, group_sizes: Tensor) -> Tensor:
    """Return y, undefined in rows of no group."""
    _check(x, w, group_sizes)
    return _torch_npu().npu_grouped_matmul(
        [x],
        [w.transpose(1, 2)],
        group_list=group_sizes,
        split_item=2,  # one tensor comes out
        group_type=0,  # rows are grouped
        # Counts, which a single group may not use; there a count is its own running sum.
        group_list_type=1 if len(group_sizes) > 1 else 0,
    )[0]


def _check(x: Tensor, w: Tensor, group_sizes: Tensor) -> None:
    given = f"x {x.dtype}{tuple(x.shape)}, w {w.dtype}{tuple(w.shape)}"
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] or x.dtype != w.dtype:
        raise ValueError(
            f"grouped_matmul: {given} must be [rows, d_in], [groups, d_out, d_in] of one dtype"
        )
    if group_sizes.dtype != torch.int64 or tuple(group_sizes.shape) != w.shape[:1]:
        sizes = f"{group_sizes.dtype}{tuple(group_sizes.shape)}"
        raise ValueError(f"grouped_matmul: group_sizes {sizes} must be int64({w.shape[0]},)")
    # Nothing is copied here to make it contiguous: a copy of w would read the padding.
    if len({x.device, w.device, group_sizes.device}) != 1 or not (
        x.is_contiguous() and w.is_contiguous() and group_sizes.is_contiguous()
    ):
        raise ValueError(f"grouped_matmul: {given} and group_sizes must be contiguous, on 1 device")
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"grouped_matmul takes {_names(DTYPES)}, not {x.dtype}")
    if len(w) > MAX_GROUPS:
        raise NotImplementedError(f"grouped_matmul takes {MAX_GROUPS} groups, not {len(w)}")
    if x.shape[1] >= INNER_LIMIT:
        raise NotImplementedError(f"grouped_matmul takes d_in below {INNER_LIMIT}: {x.shape[1]}")


def _zero_rest(y: Tensor, group_sizes: Tensor) -> Tensor:
    """Set the rows of no group to 0, in place; how many they are stays on the device."""
    row = torch.arange(len(y), device=y.device)
    return y.masked_fill_((row >= group_sizes.sum())[:, None], 0.0)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _torch_npu() -> ModuleType:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise NotImplementedError(f"no torch_npu: {error}") from error
