"""The TPU kernel of the row map, interpreted: the reference's sort to the last row, no races."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doubles.tpu_interpreter import interpreted

from lora_jax.ops import adapter_items
from lora_jax.ops.cases import popular
from lora_jax.ops.reroute import pallas_tpu, reference, reroute, row_map
from lora_jax.ops.reroute.maps import RowMap

items_of = jax.jit(adapter_items.reference, static_argnums=1)


def fields(map: RowMap) -> dict[str, jax.Array]:
    names = ("order", "inverse", "group_sizes", "row_to_token", "row_to_expert")
    return {name: getattr(map, name) for name in names}


@functools.cache
def kernel_and_meaning(op: str, num_groups: int) -> tuple[Callable, Callable]:
    """Return the op of so many groups, interpreted and by the reference; each gives fields."""

    def on_tpu(*arrays, interpret):
        return fields(getattr(pallas_tpu, op)(*arrays, num_groups, interpret=interpret))

    def wanted(*arrays):
        return fields(getattr(reference, op)(*arrays, num_groups))

    return interpreted(on_tpu), jax.jit(wanted)


def assert_right(op: str, num_groups: int, *arrays):
    """Compare with the reference, bit for bit."""
    kernel, meaning = kernel_and_meaning(op, num_groups)
    want = meaning(*arrays)
    for name, got in kernel(*arrays).items():
        np.testing.assert_array_equal(got, want[name], name)


def some_ids(tokens: int, k: int, experts: int, popularity: str) -> jax.Array:
    """Return what the tokens choose; every seventh id is nobody's."""
    rng = np.random.default_rng(0)
    ids = popular(popularity, tokens * k, experts, rng)
    ids[::7] = rng.choice([-1, -9, experts, experts + 1, 2**31 - 1], len(ids[::7]))
    return jnp.asarray(ids.reshape(tokens, k))


# Three blocks, the last of them a part; two whole ones.
@pytest.mark.parametrize("popularity", ["zipf", "identical", "none"])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "real"),
    [(150, 4, 128, 140), (256, 2, 512, 999)],
)
def test_row_map_matches_the_reference(tokens, k, experts, real, popularity):
    ids = some_ids(tokens, k, experts, popularity)
    assert_right("row_map", experts, ids, jnp.int32(real))


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "slots", "groups", "real"),
    [(1, 1, 1, 1, 1, 1), (100, 3, 130, 19, 512, 97)],
)
def test_reroute_matches_the_reference(tokens, k, experts, slots, groups, real):
    """Entries that are no group, of any size, are in none; nor are slots that the table lacks."""
    rng = np.random.default_rng(1)
    table = rng.integers(0, groups, (slots, experts))
    wrong = rng.random(table.shape) < 0.1
    table[wrong] = rng.choice([-1, groups, 2**31 - 1, -(2**31)], wrong.sum())
    owners = rng.choice([*range(slots), -1, -7, slots, 2**31 - 1], tokens)
    arrays = (jnp.asarray(a, jnp.int32) for a in (owners, table))
    ids = some_ids(tokens, k, experts, "skewed")
    assert_right("reroute", groups, ids, *arrays, jnp.int32(real))


@pytest.mark.long
def test_places_in_several_blocks(monkeypatch):
    """2100 rows have 17 lines of 128 places, in two blocks of 16."""
    monkeypatch.setattr(pallas_tpu, "ORDER_BLOCK", 16)
    assert_right("row_map", 6, some_ids(700, 3, 6, "uniform"), jnp.int32(690))


def test_declines_what_it_cannot_serve():
    ids, n = jnp.zeros((3, 2), jnp.int32), jnp.int32(3)
    slots, table = jnp.zeros(3, jnp.int32), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="row_map: the TPU kernel runs on a TPU only"):
        row_map(ids, n, 4, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="reroute: the TPU kernel runs on a TPU only"):
        reroute(ids, slots, table, n, 4, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="makes no items"):
        pallas_tpu.row_map(ids, n, 4, items_of(slots, 2), interpret=False)
    with pytest.raises(NotImplementedError, match="0 rows in 4 groups"):
        pallas_tpu.row_map(ids[:0], n, 4, interpret=False)
    with pytest.raises(NotImplementedError, match="131074 rows in 4 groups"):
        pallas_tpu.row_map(jnp.zeros((65537, 2), jnp.int32), n, 4, interpret=False)
    with pytest.raises(NotImplementedError, match="6 rows in 513 groups"):
        pallas_tpu.reroute(ids, slots, table, n, 513, interpret=False)
    with pytest.raises(NotImplementedError, match="2049 slots and 4 experts"):
        pallas_tpu.reroute(ids, slots, jnp.zeros((2049, 4), jnp.int32), n, 4, interpret=False)
