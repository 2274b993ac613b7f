"""A second copy of linear maps, with one adapter merged into all of them at a time.

A switch writes the whole copy from the plain maps in one program: nothing is ever subtracted, so
that plain steps and merged ones give the same bits however often the adapter changes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.slots import A_OFFSET, B_OFFSET, RANK, AdapterSlots
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.merge import merge_apart, merge_writer
from lora_jax.typing import Array, Float, Int

Maps = tuple[Array, ...]  # [d_out, d_in] each, of several shapes


class Shadow:
    """The copy of one model's maps, in their order."""

    def __init__(self, plain: Maps, sites: tuple[tuple[int, int], ...], max_rank: int):
        """Copy the plain maps, whose places in the slots' table are `sites`: module and layer.

        `max_rank` bounds the adapters' ranks.
        """
        self._plain, self._sites, self._max_rank = plain, sites, max_rank
        self.maps: Maps = jax.tree.map(jnp.copy, plain)
        # Those of one shape follow each other, the smallest last.
        order = sorted(range(len(plain)), key=lambda n: (-plain[n].size, plain[n].shape))
        of_order = [tuple(maps[n] for n in order) for maps in (plain, self.maps)]
        try:
            write = merge_writer(*of_order, max_rank=max_rank)
        except Declined:
            self._written = None
            return
        at = np.array([sites[n] for n in order], np.int32)
        shapes = tuple(dict.fromkeys(w.shape for w in of_order[0]))

        def written(slots: AdapterSlots, slot: Int[Array, ""]) -> Int[Array, ""]:
            pools = tuple(
                (slots.pools[str(d_in)], slots.pools[str(d_out)]) for d_out, d_in in shapes
            )
            return write(pools, *sites_of(slots, slot, at), slot)

        self._written = jax.jit(written, out_shardings=plain[0].sharding)

    def merge(self, slots: AdapterSlots, slot: Int[Array, ""]) -> Int[Array, ""]:
        """Have every map with a slot's adapter; return the slot, for programs that read the maps.

        Returns at once. A kernel may write over `maps` without a word to jax: programs that take
        the result come after it.
        """
        if self._written is not None:
            return self._written(slots, slot)
        given = self._sites, self._max_rank
        self.maps = _switched(self.maps, self._plain, slots, slot, *given)
        return slot

    def wait(self, done: Int[Array, ""]) -> None:
        """Wait until the maps are written; `done` is what `merge` returned."""
        jax.block_until_ready(self.maps if self._written is None else done)


def sites_of(
    slots: AdapterSlots, slot: Int[Array, ""], at: Int[np.ndarray, "maps 2"]
) -> tuple[Int[Array, "maps 3"], Float[Array, "maps"]]:
    """Return where a slot's rows of maps lie in their pools, as merge takes them, and scalings."""
    entries = slots.entries[at[:, 0], at[:, 1], slot]  # [maps, 5]
    sites = jnp.stack([entries[:, n] for n in (A_OFFSET, B_OFFSET, RANK)], axis=1)
    return sites, slots.scaling[at[:, 0], at[:, 1], slot]


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True, static_argnums=(4, 5))
def _switched(
    shadow: Maps,
    plain: Maps,
    slots: AdapterSlots,
    slot: Int[Array, ""],
    sites: tuple[tuple[int, int], ...],
    max_rank: int,
) -> Maps:
    """Return every map with the slot's adapter, in the memory of `shadow` (donated)."""
    del shadow  # its memory is what is wanted
    done: dict[int, Array] = {}
    shapes = [w.shape for w in plain]
    for shape in dict.fromkeys(shapes):
        members = [n for n, other in enumerate(shapes) if other == shape]
        at = np.array([sites[n] for n in members], np.int32)
        pools = slots.pools[str(shape[1])], slots.pools[str(shape[0])]
        maps = tuple(plain[n] for n in members)
        found = sites_of(slots, slot, at)
        merged = merge_apart(maps, *pools, *found, max_rank=max_rank)
        done |= dict(zip(members, merged, strict=True))
    return tuple(done[n] for n in range(len(plain)))
