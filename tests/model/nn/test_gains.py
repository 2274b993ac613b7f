"""Gains of many adapters on the rows of one map; rows without one keep their bits."""

import jax.numpy as jnp
import numpy as np
from support.cases import adapter_cases as cases

from lora_jax.adapters.gains import with_gains
from lora_jax.adapters.slots import SlotsSpec, init_slots
from lora_jax.nn.gains import add_gains
from lora_jax.nn.lora import AdapterRouting

CATALOGUE = with_gains(cases.llama(), ["q_proj"])
NAMES = CATALOGUE.module_names


def test_rows_get_the_gain_of_their_own_adapter():
    rng = np.random.default_rng(0)
    slots = init_slots(
        CATALOGUE, SlotsSpec(3, dict.fromkeys(CATALOGUE.widths, 8)), jnp.dtype("float32")
    )
    rows = rng.normal(size=(8, 16)).astype("f4")
    entries = np.zeros(slots.entries.shape, np.int32)
    at = NAMES.index("q_proj.gain"), 0
    entries[(*at, 0)], entries[(*at, 2)] = (2, 2, 2, 0, 0), (6, 6, 2, 0, 0)
    slots = type(slots)(
        slots.pools | {"16": jnp.asarray(rows)},
        jnp.asarray(entries),
        slots.scaling,
        slots.token_ids,
    )
    owners = np.array([0, 1, 2, -1, 0], np.int32)
    y = rng.normal(size=(5, 16)).astype("f4")
    routing = AdapterRouting(jnp.int32(5), jnp.asarray(owners), slots, NAMES, 4)
    assert routing.brings
    got, other = add_gains((jnp.asarray(y), jnp.asarray(y)), routing, ("q_proj", None), 0)
    assert np.array_equal(other, y)
    for row, slot in enumerate(owners):
        first = {0: 2, 2: 6}.get(int(slot))
        if first is None:
            assert np.array_equal(got[row], y[row])
        else:
            want = y[row] + rows[first] * y[row] + rows[first + 1]
            np.testing.assert_allclose(got[row], want, rtol=1e-6)
    # Without room for what adapters bring, and of plain slots, nothing is computed.
    plain = AdapterRouting(jnp.int32(5), jnp.asarray(owners), slots.plain, NAMES, 4)
    assert not plain.brings
    same = jnp.asarray(y)
    assert add_gains((same,), plain, ("q_proj",), 0)[0] is same
    assert add_gains((same,), routing, ("k_proj",), 0)[0] is same
