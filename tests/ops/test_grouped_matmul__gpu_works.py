"""The works of the Mosaic GPU kernel: each group's tiles and blocks, once, in the list's order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.grouped_matmul._gpu_tiles import ALIGN
from lora_jax.ops.grouped_matmul._gpu_works import Works


def listed(sizes: np.ndarray, works: Works) -> list[tuple[int, int, int, int, int]]:
    """Return (group, tile, row, low, high) of all works; every tile begins at another block."""
    found, start = [], 0
    for group, size in enumerate([*sizes.tolist(), works.rows - sizes.sum()]):
        first = start // ALIGN * ALIGN
        blocks = -(-(start % ALIGN + size) // works.tile_rows) if size else 0
        for tile in range(works.tiles):
            for block in range(blocks):
                row = first + (tile + block) % blocks * works.tile_rows
                low, high = max(start - row, 0), min(start + size - row, works.tile_rows)
                found.append((group, tile, row, low, high))
        start += size
    return found


def walked(sizes: np.ndarray, works: Works, cta: int) -> list[tuple[int, int, int, int, int]]:
    """Return what a CTA is told to do."""
    told = []

    def do(*work):
        jax.debug.callback(lambda *w: told.append(tuple(map(int, w))), *work, ordered=True)

    run = jax.jit(lambda given: works.for_each(given, jnp.int32(cta), do))
    steps = int(jax.block_until_ready(run(jnp.asarray(sizes, jnp.int32))))
    jax.effects_barrier()
    *real, last = told
    assert last[0] > works.groups, "called once more, for nothing"
    counts = [w[-1] for w in real]
    inside = [w[0] < works.groups for w in real]
    assert counts == [works.steps * sum(inside[:i]) for i in range(len(real))]
    assert steps == works.steps * sum(inside)
    return [w[:-1] for w in real]


def drawn(name: str, groups: int) -> np.ndarray:
    rng, sizes = np.random.default_rng(3), np.zeros(groups, np.int64)
    if name == "base":
        sizes[: groups // 4] = rng.integers(0, 9, groups // 4)
    elif name == "few":
        sizes[[1, groups // 2, groups - 1]] = 5, 1, 3
    elif name == "all":
        sizes[:] = rng.integers(0, 30, groups)
    elif name == "last":
        sizes[-1] = 40
    return sizes


@pytest.mark.parametrize("groups", [3, 9, 150])
@pytest.mark.parametrize("name", ["base", "few", "all", "last", "none"])
@pytest.mark.parametrize("padding", [0, 13])
def test_every_work_is_done_once_by_its_cta(name, groups, padding):
    sizes = drawn(name, groups)
    rows, ctas = int(sizes.sum()) + padding, 5
    works = Works(groups, rows, 16, 3, 7, ctas)
    want = listed(sizes, works)
    for cta in (0, 3):
        assert walked(sizes, works, cta) == want[cta::ctas]


def test_a_cta_does_not_come_to_the_same_block_of_every_tile():
    works = Works(1, 48, 16, 4, 7, ctas=3)  # three blocks, so that a CTA gets one of each tile
    rows = [row for _, _, row, *_ in walked(np.array([48]), works, 0)]
    assert rows == [0, 16, 32, 0]
