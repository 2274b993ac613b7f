"""LoRA for rows of many adapters by the shrink and expand operators of vllm-ascend.

Its kernels check almost nothing: a rank that expand does not implement, a float type that is not
the expected one or a width that is no whole number of 32-byte blocks gives garbage. So everything
is checked here. They exist for A2 and A3; a row or segment of adapter -1 is skipped.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

RANKS = (8, 16, 32, 64)  # what expand implements
DTYPES = (torch.float16, torch.bfloat16)
BLOCK = 16  # elements of those types in the 32 bytes that the copies move at least
_LIBRARIES = ("torch_npu", "vllm_ascend.vllm_ascend_C")  # the second registers the operators


def padded_rank(rank: int) -> int:
    """Return the smallest rank that expand implements and that holds `rank`.

    Raises:
        ValueError: below 1.
        NotImplementedError: above 64, where only plain operators are left.
    """
    if rank < 1:
        raise ValueError(f"rank {rank} must be at least 1")
    if rank > RANKS[-1]:
        raise NotImplementedError(f"LoRA on an NPU has ranks up to {RANKS[-1]}, not {rank}")
    return next(found for found in RANKS if found >= rank)


def pad_ranks(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A [rank, d_in] and B [d_out, rank] of one adapter, filled up with zeros to `rank`.

    Raises:
        ValueError: the two have different ranks, or a larger one than `rank`.
    """
    own = a.shape[0]
    if own != b.shape[1] or own > rank:
        raise ValueError(f"A {tuple(a.shape)} and B {tuple(b.shape)} must share a rank <= {rank}")
    more = rank - own
    return torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))


def expert_adapters(row_to_slot: Tensor, row_to_expert: Tensor, num_experts: int) -> Tensor:
    """Return slot * num_experts + expert for each row, int64; -1 stays: stacks of MoE adapters."""
    index = row_to_slot.long() * num_experts + row_to_expert.long()
    return torch.where(row_to_slot < 0, -1, index)


def shrink(x: Tensor, a: Tensor, adapters: Tensor, lengths: Tensor | None = None) -> Tensor:
    """h[t] = a[adapters[t]] @ x[t] in float32 [rows, rank]; 0 for adapter -1.

    x [rows, d_in], a [adapters, rank, d_in], adapters int64 [rows] (BGMV). With `lengths` int64,
    adapters[i] belongs to the next lengths[i] rows (SGMV); rows after all segments give 0. Indices
    at or past len(a) are the caller's mistake and are not seen.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a rank not in RANKS.
        NotImplementedError: beyond the kernels' limits, or they are not installed.
    """
    _check_weights("shrink", a, rank_axis=1)
    rows, d_in = _shape("shrink", "x", x, 2)
    _, rank, width = a.shape
    _require(width == d_in and x.dtype == a.dtype, f"shrink: x {_said(x)} and a {_said(a)} differ")
    _check_adapters("shrink", rows, adapters, lengths)
    _check_device("shrink", x, a, adapters, lengths)
    if d_in <= rank:
        raise NotImplementedError(f"shrink takes d_in above the rank {rank}, not {d_in}")
    _check_width("shrink", "d_in", d_in)
    # Skipped rows are not written, so they must be 0 before.
    h = torch.zeros((rows, rank), dtype=torch.float32, device=x.device)
    if rows and lengths is None:
        _operator("bgmv_shrink")(x, a, adapters, h, 1.0)
    elif rows:
        _operator("sgmv_shrink")(x, a, adapters, lengths, h, 1.0)
    return h


def expand(
    y: Tensor,
    h: Tensor,
    b: Tensor,
    adapters: Tensor,
    lengths: Tensor | None = None,
    *,
    offset: int = 0,
) -> Tensor:
    """Add b[adapters[t]] @ h[t] to y[t, offset : offset + d_out], in place, and return y.

    y [rows, width], h float32 [rows, rank], b [adapters, d_out, rank] of y's dtype; the rest, and
    the errors, as in `shrink`.
    """
    _check_weights("expand", b, rank_axis=2)
    rows, width = _shape("expand", "y", y, 2)
    _, d_out, rank = b.shape
    _require(y.dtype == b.dtype, f"expand: y {_said(y)} and b {_said(b)} differ")
    fits = tuple(h.shape) == (rows, rank) and h.dtype == torch.float32 and h.is_contiguous()
    _require(fits, f"expand: h {_said(h)} must be contiguous float32({rows}, {rank})")
    inside = offset >= 0 and offset + d_out <= width
    _require(inside, f"expand: columns {offset} to {offset + d_out} are not in y {_said(y)}")
    _check_adapters("expand", rows, adapters, lengths)
    _check_device("expand", y, h, b, adapters, lengths)
    if d_out < rank:
        raise NotImplementedError(f"expand takes d_out of at least the rank {rank}, not {d_out}")
    for name, number in (("d_out", d_out), ("offset", offset), ("the width of y", width)):
        _check_width("expand", name, number)
    if rows and lengths is None:
        _operator("bgmv_expand")(h, b, adapters, y, offset, d_out)
    elif rows:
        _operator("sgmv_expand")(h, b, adapters, lengths, y, offset, d_out)
    return y


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: Tensor, adapters: Tensor
) -> Tensor:
    """Add scaling[i] * b[i] @ (a[i] @ x[t]) to y[t], i = adapters[t], in place, and return y.

    scaling is float32 [adapters]: the operators have one factor for all, and adapters differ.
    """
    fits = tuple(scaling.shape) == a.shape[:1] and scaling.dtype == torch.float32
    _require(fits, f"add_lora: scaling {_said(scaling)} must be float32({len(a)},)")
    h = shrink(x, a, adapters) * scaling[adapters.clamp(min=0)][:, None]
    return expand(y, h, b, adapters)


def _check_weights(op: str, weight: Tensor, rank_axis: int) -> None:
    shape = _shape(op, "the stack of weights", weight, 3)
    rank = shape[rank_axis]
    if weight.dtype not in DTYPES:
        raise NotImplementedError(f"{op} takes float16 and bfloat16, not {weight.dtype}")
    # Another one would leave garbage, without a word.
    _require(rank in RANKS, f"{op}: rank {rank} is not one of {RANKS}; pad_ranks fills it up")


def _check_adapters(op: str, rows: int, adapters: Tensor, lengths: Tensor | None) -> None:
    want = (rows,) if lengths is None else tuple(lengths.shape)
    for name, array in (("adapters", adapters), ("lengths", lengths)):
        if array is not None:
            fits = tuple(array.shape) == want and array.ndim == 1 and array.dtype == torch.int64
            fits = fits and array.is_contiguous()
            _require(fits, f"{op}: {name} {_said(array)} must be contiguous int64{want}")


def _check_device(op: str, *arrays: Tensor | None) -> None:
    """Raise ValueError unless all lie on one device: the operators take bare addresses."""
    devices = {str(array.device) for array in arrays if array is not None}
    _require(len(devices) == 1, f"{op}: arrays are on {', '.join(sorted(devices))}, not on one")


def _check_width(op: str, name: str, number: int) -> None:
    if number % BLOCK:
        raise NotImplementedError(f"{op} takes {name} in multiples of {BLOCK}, not {number}")


def _shape(op: str, name: str, array: Tensor, dims: int) -> tuple[int, ...]:
    fits = array.ndim == dims and array.is_contiguous()
    _require(fits, f"{op}: {name} {_said(array)} must be contiguous with {dims} dimensions")
    return tuple(array.shape)


def _said(array: Tensor) -> str:
    return f"{str(array.dtype).removeprefix('torch.')}{tuple(array.shape)}"


def _require(true: bool, message: str) -> None:
    if not true:
        raise ValueError(message)


def _operator(name: str) -> Callable:
    """Return one of vllm-ascend's operators."""
    try:
        for library in _LIBRARIES:
            importlib.import_module(library)
        return getattr(torch.ops._C_ascend, name)
    except (ImportError, OSError, AttributeError) as error:
        raise NotImplementedError(f"LoRA on an NPU needs vllm-ascend: {error}") from error
