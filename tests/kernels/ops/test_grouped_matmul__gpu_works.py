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


class Walk:
    """The works of one shape, compiled once, as any CTA is told to do them."""

    def __init__(self, works: Works):
        self.works, self.told = works, []
        self.run = jax.jit(lambda sizes, last, cta: works.for_each(sizes, last, cta, self.do))

    def do(self, *work):
        jax.debug.callback(lambda *w: self.told.append(tuple(map(int, w))), *work, ordered=True)

    def __call__(
        self, sizes: np.ndarray, cta: int, num_rows: int | None = None
    ) -> list[tuple[int, int, int, int, int]]:
        """Return a CTA's works; from `num_rows` on, if that is known, no row has a group."""
        self.told.clear()
        last = self.works.rows if num_rows is None else num_rows
        steps = int(self.run(jnp.asarray(sizes, jnp.int32), jnp.int32(last), jnp.int32(cta)))
        jax.effects_barrier()
        *real, nothing = self.told
        assert nothing[0] > self.works.groups, "called once more, for nothing"
        counts = [w[-1] for w in real]
        inside = [w[0] < self.works.groups for w in real]
        assert counts == [self.works.steps * sum(inside[:i]) for i in range(len(real))]
        assert steps == self.works.steps * sum(inside)
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


@pytest.mark.parametrize(
    "name", ["few", *(pytest.param(n, marks=pytest.mark.long) for n in ("base", "none"))]
)
@pytest.mark.parametrize("more", [0, 4])
def test_the_number_of_rows_changes_nothing(name, more):
    """Exact, or more than groups have."""
    sizes = drawn(name, 150)
    works = Works(150, int(sizes.sum()) + 13, 16, 3, 7, 5)
    assert Walk(works)(sizes, 3, int(sizes.sum()) + more) == listed(sizes, works)[3::5]


def test_behind_the_last_row_of_a_group_no_group_is_looked_at():
    sizes = drawn("base", 150)
    works = Works(150, int(sizes.sum()) + 13, 16, 3, 7, 1)
    wrong = sizes.copy()
    wrong[-9:] = 7
    walk = Walk(works)
    assert walk(wrong, 0, int(sizes.sum())) == listed(sizes, works)
    assert walk(wrong, 0, int(sizes.sum()) + 1) != listed(sizes, works)


@pytest.mark.parametrize("groups", [3, 9, 150])
@pytest.mark.parametrize("name", ["base", "few", "all", "last", "none"])
@pytest.mark.parametrize("padding", [0, 13])
def test_every_work_is_done_once_by_its_cta(name, groups, padding):
    sizes = drawn(name, groups)
    rows, ctas = int(sizes.sum()) + padding, 5
    works = Works(groups, rows, 16, 3, 7, ctas)
    want, walk = listed(sizes, works), Walk(works)
    for cta in (0, 3):
        assert walk(sizes, cta) == want[cta::ctas]


def test_a_cta_does_not_come_to_the_same_block_of_every_tile():
    works = Works(1, 48, 16, 4, 7, ctas=3)  # three blocks, so that a CTA gets one of each tile
    rows = [row for _, _, row, *_ in Walk(works)(np.array([48]), 0)]
    assert rows == [0, 16, 32, 0]
