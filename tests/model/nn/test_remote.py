"""A layer whose adapters are computed elsewhere gives the bits of one that computes them itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.config import ClampedSwiglu, MoeConfig
from lora_jax.nn.lora import AdapterRouting, add_lora
from lora_jax.nn.moe import MoeBlock
from lora_jax.nn.remote import Exchange, RemoteExperts

PLAIN = MoeConfig(num_experts=4, top_k=2, intermediate_size=24, layers=(0, 1))
KINDS = {
    "plain": PLAIN,
    "biased": dataclasses.replace(PLAIN, bias=True, swiglu=ClampedSwiglu(1.7, 7.0)),
    "shared": dataclasses.replace(PLAIN, shared_size=8),
}
NAMES = ("experts.down_proj", "experts.gate_proj", "experts.up_proj", "router")
HIDDEN, RANK, TOKENS, REAL = 16, 3, 12, 10


class Elsewhere:
    """Computes at `push` what the adapters add, as a server would."""

    def __init__(self, slots: AdapterSlots, has_local: bool = False):
        self.slots, self.log, self.has_local = slots, [], has_local

    def has(self, module, layer):
        return module.startswith("experts.")

    def exchange(self, names, layer, row_to_slot, row_to_expert, num_rows):
        assert num_rows.shape == ()
        return ElsewhereOnce(self, names, layer, row_to_slot, row_to_expert)


class ElsewhereOnce:
    def __init__(self, parent, names, layer, row_to_slot, row_to_expert):
        self.parent, self.names, self.layer = parent, names, layer
        self.rows, self.deltas = (row_to_slot, row_to_expert), ()

    def push(self, x):
        self.parent.log.append((self.names, self.layer))
        widths = dict.fromkeys(NAMES[1:3], 24) | {NAMES[0]: HIDDEN}
        zeros = [jnp.zeros((x.shape[0], widths[name]), x.dtype) for name in self.names]
        row_to_slot, row_to_expert = self.rows
        routing = AdapterRouting(jnp.int32(x.shape[0]), row_to_slot, self.parent.slots, NAMES, RANK)
        self.deltas = add_lora(zeros, x, routing, self.names, self.layer, row_to_expert)
        return x

    def wait_add(self, ys, x):
        return tuple(y + delta for y, delta in zip(ys, self.deltas, strict=True))


def make_slots(rng: np.random.Generator) -> AdapterSlots:
    """Two slots, the second without the router and without layer 0."""
    pools = {
        str(w): jnp.asarray(0.3 * rng.standard_normal((400, w)), jnp.float32)
        for w in (4, HIDDEN, 24)
    }
    entries = np.zeros((len(NAMES), 2, 2, 5), np.int32)
    start = dict.fromkeys(pools, 0)
    widths = {"experts.down_proj": (24, HIDDEN), "router": (HIDDEN, 4)}
    for module, name in enumerate(NAMES):
        d_in, d_out = widths.get(name, (HIDDEN, 24))
        for layer in range(2):
            for slot in range(2):
                if slot == 1 and (name == "router" or layer == 0):
                    continue
                stride = RANK if name != "router" else 0
                rows = []
                for width in map(str, (d_in, d_out)):
                    rows.append(start[width])
                    start[width] += 4 * RANK
                entries[module, layer, slot] = (*rows, RANK, stride, stride)
    scaling = np.full(entries.shape[:3], 2.0, np.float32)
    assert max(start.values()) <= 400
    return AdapterSlots(pools, jnp.asarray(entries), jnp.asarray(scaling))


def without_experts(slots: AdapterSlots) -> AdapterSlots:
    return dataclasses.replace(slots, entries=slots.entries.at[:3].set(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [0, 1])
def test_bits_are_those_of_a_layer_with_its_own_adapters(kind, layer):
    rng = np.random.default_rng(0)
    block = MoeBlock(HIDDEN, KINDS[kind], layer, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(block.experts, name)[...] *= 10
    slots = make_slots(rng)
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32)
    row_to_slot = jnp.asarray([-1, 0, 1, 0, -1, 1, 1, 0, 0, -1, -1, -1], jnp.int32)
    plain = AdapterRouting(jnp.int32(REAL), row_to_slot, slots, NAMES, RANK)
    elsewhere = Elsewhere(slots)
    assert isinstance(elsewhere, RemoteExperts)
    remote = dataclasses.replace(plain, adapters=without_experts(slots), remote=elsewhere)

    want = jax.jit(lambda x: block(x, plain))(x)
    got = jax.jit(lambda x: block(x, remote))(x)
    np.testing.assert_array_equal(got, want)
    assert elsewhere.log == [((NAMES[1], NAMES[2]), layer), ((NAMES[0],), layer)]

    base = jax.jit(lambda x: block(x, dataclasses.replace(plain, adapters=None)))(x)
    np.testing.assert_array_equal(got[row_to_slot < 0], base[row_to_slot < 0])
    assert not np.array_equal(got[:REAL], base[:REAL])


def test_adapters_whose_experts_are_here_are_computed_here():
    """Slot 0 is the server's, slot 1 has its experts here: the bits are the same."""
    rng = np.random.default_rng(1)
    block = MoeBlock(HIDDEN, PLAIN, 1, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    slots = make_slots(rng)
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32)
    row_to_slot = jnp.asarray([-1, 0, 1, 0, -1, 1, 1, 0, 0, -1, -1, -1], jnp.int32)
    plain = AdapterRouting(jnp.int32(REAL), row_to_slot, slots, NAMES, RANK)
    server = dataclasses.replace(slots, entries=slots.entries.at[:3, :, 1].set(0))
    own = dataclasses.replace(slots, entries=slots.entries.at[:3, :, 0].set(0))
    rows = dataclasses.replace(plain, adapters=own, remote=Elsewhere(server, has_local=True))
    want = jax.jit(lambda x: block(x, plain))(x)
    np.testing.assert_array_equal(jax.jit(lambda x: block(x, rows))(x), want)
    deaf = dataclasses.replace(rows, remote=Elsewhere(server))
    assert not np.array_equal(jax.jit(lambda x: block(x, deaf))(x)[2], want[2])


def test_rows_keep_the_way_to_the_server_when_they_are_gathered():
    elsewhere = Elsewhere(make_slots(np.random.default_rng(0)))
    exchange = elsewhere.exchange((NAMES[0],), 0, jnp.zeros(2), jnp.zeros(2), jnp.int32(2))
    assert isinstance(exchange, Exchange)
    rows = AdapterRouting(
        jnp.int32(2), jnp.zeros(2, jnp.int32), None, NAMES, RANK, remote=elsewhere
    )
    assert rows.gathered(jnp.asarray([1, 0, 1]), jnp.int32(3)).remote is elsewhere
