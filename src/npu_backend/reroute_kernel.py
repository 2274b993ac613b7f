"""The rerouting kernel in Triton, for triton-ascend; any Triton runs it in its interpreter.

ExpertWeave, section 4.3: one fused pass instead of a chain of small operators. This file imports
triton alone, so that triton-ascend's own environment can load it.
"""

import triton
import triton.language as tl


@triton.jit
def reroute_kernel(
    ids_ptr,
    row_to_slot_ptr,
    table_ptr,
    groups_ptr,
    num_rows,
    slots,
    experts,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
):
    """groups[r] = table[row_to_slot[r], ids[r]]; ids[r] for no slot, -1 for no expert.

    triton-ascend lowers a load at computed addresses to a loop of scalars, and only a contiguous
    one with a mask at its end to one copy; so the table comes whole into the vector core's own
    memory, and is looked up there. Its gather refuses integers: the table is float32.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cells = tl.arange(0, CELLS)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1)
    slot = tl.load(row_to_slot_ptr + rows, mask=rows < num_rows, other=-1)
    table = tl.load(table_ptr + cells, mask=cells < slots * experts, other=0.0)

    row = tl.minimum(tl.maximum(slot, 0), slots - 1)
    cell = row * experts + tl.minimum(tl.maximum(ids, 0), experts - 1)
    moved = tl.gather(table, cell, 0).to(tl.int32)
    groups = tl.where((slot >= 0) & (slot < slots), moved, ids)
    groups = tl.where((ids >= 0) & (ids < experts), groups, -1)
    tl.store(groups_ptr + rows, groups, mask=rows < num_rows)
