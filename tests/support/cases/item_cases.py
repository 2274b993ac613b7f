"""Invariants of row items, whichever implementation makes them."""

import numpy as np

from lora_jax.ops.reroute.maps import RowMap


def check_items(items: np.ndarray, map: RowMap, most: int) -> None:
    """Fail unless the items hold each row of an adapter once, by adapter and expert."""
    slots, experts = np.asarray(map.items.row_to_slot), np.asarray(map.row_to_expert)
    covered = []
    for slot, expert, first, num_rows in np.asarray(items):
        places = np.arange(first, first + num_rows)
        assert 1 <= num_rows <= most
        np.testing.assert_array_equal(slots[places], slot)
        np.testing.assert_array_equal(experts[places], expert)
        covered += list(places)
    np.testing.assert_array_equal(covered, np.flatnonzero(slots >= 0))
