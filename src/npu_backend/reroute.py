"""Rows of a mixture of experts find the matrix they use, and stand together by it, in torch.

ExpertWeave, section 4.3: `reroute` is its fused kernel, `reroute_plain` the chain of operators that
it is measured against, `row_map` the sort that grouped matmul wants.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

BLOCK = 256  # rows that one program looks up
# A table of 32 KiB beside its rows leaves most of the 192 KiB of a vector core on A2 and A3 free.
MAX_CELLS = 8192
_EXACT = 1 << 24  # whole numbers below are exact in float32


def pack(table: Tensor) -> Tensor:
    """Return table[slots, experts] as the kernel reads it, float32; once per load, not per step.

    Raises:
        ValueError: not two dimensions, empty, not integers, or groups outside [0, 2^24).
        NotImplementedError: more cells than a vector core is given room for.
    """
    if table.ndim != 2 or 0 in table.shape or table.is_floating_point():
        raise ValueError(f"reroute: table {table.dtype}{tuple(table.shape)} must be integers, 2-D")
    if table.numel() > MAX_CELLS:
        raise NotImplementedError(f"reroute takes {MAX_CELLS} cells, not {table.numel()}")
    if int(table.min()) < 0 or int(table.max()) >= _EXACT:
        raise ValueError(f"reroute: table has groups outside [0, {_EXACT})")
    return table.to(torch.float32).contiguous()


def reroute(topk_ids: Tensor, row_to_slot: Tensor, packed: Tensor) -> Tensor:
    """Return groups[t, j] = table[slot, topk_ids[t, j]], int32, by the fused kernel.

    `row_to_slot` [tokens * k] is token_to_slot.repeat_interleave(k), made once per step for all
    layers. A slot outside [0, slots) is no adapter: the id itself. Ids outside [0, experts) give
    -1, no group. `packed` is float32[slots, experts] from `pack`.

    Raises:
        ValueError: shapes or dtypes other than these.
        NotImplementedError: there is no triton.
    """
    rows = topk_ids.numel()
    _check("topk_ids", topk_ids, torch.int32, topk_ids.shape if topk_ids.ndim == 2 else (-1, -1))
    _check("row_to_slot", row_to_slot, torch.int32, (rows,))
    _check("packed", packed, torch.float32, packed.shape if packed.ndim == 2 else (-1, -1))
    groups = torch.empty_like(topk_ids)
    if rows:
        slots, experts = packed.shape
        cells = 1 << (packed.numel() - 1).bit_length()
        launch = _kernels().reroute_kernel[(-(-rows // BLOCK),)]
        arrays = (topk_ids, row_to_slot, packed, groups)
        launch(*arrays, rows, slots, experts, BLOCK=BLOCK, CELLS=cells)
    return groups


def reroute_plain(topk_ids: Tensor, token_to_slot: Tensor, table: Tensor) -> Tensor:
    """Return what `reroute` does by plain operators: for comparison, and for larger tables."""
    slots, experts = table.shape
    row = token_to_slot.clamp(0, slots - 1).long()[:, None]
    moved = table[row, topk_ids.clamp(0, experts - 1).long()].to(topk_ids.dtype)
    known = (token_to_slot >= 0) & (token_to_slot < slots)
    groups = torch.where(known[:, None], moved, topk_ids)
    return torch.where((topk_ids >= 0) & (topk_ids < experts), groups, -1)


def row_map(groups: Tensor, num_tokens: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (order, inverse, group_sizes), int64, of the stable sort of rows t * k + j by group.

    Rows of tokens at or after num_tokens, and of groups outside [0, num_groups), come last and are
    in no group.
    """
    tokens, k = groups.shape
    token = torch.arange(tokens, device=groups.device)[:, None]
    real = (token < num_tokens) & (groups >= 0) & (groups < num_groups)
    key = torch.where(real, groups, num_groups).reshape(-1).long()
    order = torch.sort(key, stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(tokens * k, device=groups.device)
    sizes = torch.zeros(num_groups + 1, dtype=torch.int64, device=groups.device)
    sizes.scatter_add_(0, key, torch.ones_like(key))
    return order, inverse, sizes[:num_groups]


def _check(name: str, array: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or tuple(array.shape) != tuple(shape) or not array.is_contiguous():
        given = f"{array.dtype}{tuple(array.shape)}"
        raise ValueError(f"reroute: {name} {given} must be contiguous {dtype}{tuple(shape)}")


def _kernels() -> ModuleType:
    """Load the kernels, which need triton: triton-ascend on an NPU."""
    try:
        return importlib.import_module("npu_backend.reroute_kernel")
    except ImportError as error:
        raise NotImplementedError(f"reroute needs triton-ascend: {error}") from error
