"""Routing and experts against plain numpy, and their bits in any company."""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.config import ClampedSwiglu, MoeConfig
from lora_jax.nn import lora, moe
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.moe import MoeBlock, Router, clamped_swiglu, combine, own_tables
from lora_jax.ops import dispatch
from lora_jax.ops.choose_experts import reference
from lora_jax.ops.lora_gemm import lora_gemms
from lora_jax.ops.reroute import row_map
from lora_jax.sharding import AXIS

BASE = MoeConfig(num_experts=12, top_k=3, intermediate_size=20, layers=(0,))


def test_clamped_swiglu():
    rng = np.random.default_rng(0)
    gate, up = (6 * rng.standard_normal((2, 5, 7))).astype(np.float32)
    g, u = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    want = (u + 1) * g / (1 + np.exp(-1.702 * g))
    got = clamped_swiglu(jnp.asarray(gate), jnp.asarray(up), ClampedSwiglu(1.702, 7.0))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_combine():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 12, (5, 3)), jnp.int32)
    map = row_map(ids, jnp.int32(5), 12)
    by_token = rng.standard_normal((5, 3, 8)).astype(np.float32)
    weights = rng.random((5, 3)).astype(np.float32)
    rows = jnp.asarray(by_token.reshape(15, 8))[map.order]
    want = (weights[..., None] * by_token).sum(1)
    np.testing.assert_allclose(combine(rows[map.inverse], jnp.asarray(weights)), want, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_block_is_the_weighted_sum_of_its_experts(dtype):
    moe = dataclasses.replace(BASE, shared_size=16, topk_norm=1.0)
    block = MoeBlock(32, moe, 0, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    block.router.weight[...] *= 50  # else every expert weighs the same
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.standard_normal((8, 32)), dtype).astype(jnp.float32))
    gate, up, down = (
        np.asarray(p[...].astype(jnp.float32))
        for p in (block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj)
    )

    def mlp(row, gate, up, down):
        inner = gate @ row
        return down @ (inner / (1 + np.exp(-inner)) * (up @ row))

    shared = [
        np.asarray(m.weight[...].astype(jnp.float32))
        for m in (
            block.shared_experts.gate_proj,
            block.shared_experts.up_proj,
            block.shared_experts.down_proj,
        )
    ]
    slots = jnp.full((8,), -1, jnp.int32)
    rows = AdapterRouting(jnp.int32(6), slots, adapters=None, module_names=(), max_rank=0)
    run = jax.jit(lambda x: block(x, rows).astype(jnp.float32))
    got = np.asarray(run(jnp.asarray(x, dtype)))
    for token in range(6):
        logits = jnp.asarray(np.asarray(block.router.weight[...]) @ x[token])[None]
        weights, ids = (np.asarray(a)[0] for a in reference.choose_experts(logits, moe))
        want = mlp(x[token], *shared)
        for weight, expert in zip(weights, ids, strict=True):
            want = want + weight * mlp(x[token], gate[expert], up[expert], down[expert])
        tolerance = 1e-6 if dtype == jnp.float32 else 2e-2 * np.abs(want).max()
        np.testing.assert_allclose(got[token], want, atol=tolerance)


def test_router_is_float32_in_a_bfloat16_model():
    router = Router(32, BASE, 0, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.bfloat16)
    slots = jnp.full((4,), -1, jnp.int32)
    rows = AdapterRouting(jnp.int32(4), slots, adapters=None, module_names=(), max_rank=0)
    want = np.asarray(x.astype(jnp.float32)) @ np.asarray(router.weight[...]).T
    np.testing.assert_allclose(router(x, rows), want, atol=1e-6)


def test_router_takes_adapters_in_a_bfloat16_model():
    """The slots hold bfloat16; the sum is float32, and a base row keeps its bits."""
    router = Router(32, BASE, 0, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 32)), jnp.bfloat16)
    pools = {
        str(width): jnp.asarray(rng.standard_normal((3, width)), jnp.bfloat16) for width in (32, 12)
    }
    entries = jnp.asarray([[[[1, 0, 2, 0, 0]]]], jnp.int32)  # A rows 1, 2 and B rows 0, 1
    adapters = AdapterSlots(pools, entries, jnp.full((1, 1, 1), 0.25, jnp.float32))
    slots = jnp.asarray([0, -1, 0, -1], jnp.int32)
    rows = AdapterRouting(jnp.int32(4), slots, adapters, module_names=("router",), max_rank=2)
    base = np.asarray(router(x, dataclasses.replace(rows, adapters=None)))
    got = np.asarray(router(x, rows))
    wide = [np.asarray(a.astype(jnp.float32)) for a in (x, pools["32"][1:3], pools["12"][:2])]
    delta = 0.25 * wide[0] @ wide[1].T @ wide[2]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[::2], (base + delta)[::2], atol=2e-2 * np.abs(delta).max())
    np.testing.assert_array_equal(got[1::2], base[1::2])


def adapted_block() -> tuple[MoeBlock, jax.Array, AdapterRouting]:
    """Return a block, 8 rows and their routing; the adapters have all maps of all experts."""
    block = MoeBlock(32, BASE, 0, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    width, experts = block.experts.gate_proj.shape[1], block.experts.num_groups
    pools = {
        str(w): jnp.asarray(rng.standard_normal((3 * experts, w)), jnp.float32) for w in (32, width)
    }
    entries = jnp.asarray([[[[0, 0, 1, 1, 1], [experts, experts, 2, 2, 2]]]] * 3, jnp.int32)
    scaling = jnp.full((3, 1, 2), 0.5, jnp.float32)
    adapters = AdapterSlots(pools, entries, scaling)
    names = tuple(f"experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    slots = jnp.asarray([1, -1, 0, 1, 0, 0, 1, -1], jnp.int32)
    rows = AdapterRouting(jnp.int32(7), slots, adapters, names, max_rank=2)
    return block, jnp.asarray(rng.standard_normal((8, 32)), jnp.float32), rows


def test_experts_give_the_same_bits_whether_rows_come_by_adapter_or_not(monkeypatch):
    monkeypatch.setenv(dispatch.ENV, "reference")
    block, x, rows = adapted_block()
    plain = np.asarray(jax.jit(lambda x: block(x, rows))(x))
    sorted_too = np.asarray(jax.jit(lambda x: block(x, rows.with_items()))(x))
    np.testing.assert_array_equal(sorted_too[:7], plain[:7])
    bare = dataclasses.replace(rows, adapters=None)
    base = np.asarray(jax.jit(lambda x: block(x, bare))(x))
    changed = (plain != base).any(axis=1)[:7]
    np.testing.assert_array_equal(changed, np.asarray(rows.row_to_slot)[:7] >= 0)


@pytest.mark.long  # tests/unit/cuda_backend/test_lora_calls.py asks the kernels' calls
def test_many_rows_ask_for_an_adapter_before_they_read_deltas(monkeypatch):
    """Deltas of rows none of which has an adapter are NaN here, where zeros are not asked for."""
    monkeypatch.setenv(dispatch.ENV, "reference")
    block, x, rows = adapted_block()
    asked = []

    def no_zeros(*args, zeros_if_idle, row_to_slot, **options):
        asked.append(zeros_if_idle)
        idle = jnp.all(row_to_slot < 0) & (not zeros_if_idle)
        done = lora_gemms(*args, row_to_slot=row_to_slot, **options)
        return tuple(jnp.where(idle, jnp.nan, delta) for delta in done)

    monkeypatch.setattr(lora, "lora_gemms", no_zeros)
    base = block(x, dataclasses.replace(rows, adapters=None))
    nobody = jnp.full((8,), -1, jnp.int32)
    idle = dataclasses.replace(rows, row_to_slot=nobody).with_items()
    some = block(x, rows.with_items())
    assert asked == [True, True]
    monkeypatch.setattr(moe, "ROWS_OF_ZEROS", 8 * BASE.top_k)
    np.testing.assert_array_equal(block(x, idle), base)
    np.testing.assert_array_equal(block(x, rows.with_items()), some)
    assert asked[2:] == [False] * 4
    block(x, rows)  # nobody has counted its rows with an adapter
    assert asked[6:] == [True, True]


def test_esft_rows_use_their_own_experts_and_others_keep_their_bits():
    """Groups behind the base's hold other matrices; a table says which tokens use them."""
    plain = MoeBlock(32, BASE, 0, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    plain.router.weight[...] *= 50
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 32)), jnp.float32)
    slots = jnp.full((8,), -1, jnp.int32)
    rows = AdapterRouting(jnp.int32(7), slots, adapters=None, module_names=(), max_rank=0)
    base = np.asarray(plain(x, rows))
    merged = [nnx.clone(plain, graph=False) for _ in range(2)]
    tables = np.tile(np.arange(12, dtype=np.int32), (1, 2, 1))
    own = {0: {3: 12, 5: 13, 0: 14}, 1: {3: 16, 11: 15}}  # slot -> expert -> group
    for name in ("gate_proj", "up_proj", "down_proj"):
        old = np.asarray(getattr(plain.experts, name)[...])
        wide = np.concatenate([old, rng.standard_normal((6, *old.shape[1:])).astype("f4")])
        for slot, experts in own.items():
            new = old.copy()
            for expert, group in experts.items():
                new[expert] = wide[group]
                tables[0, slot, expert] = group
            getattr(merged[slot].experts, name)[...] = jnp.asarray(new)
        param = getattr(plain.experts, name)
        setattr(plain.experts, name, param.replace(jnp.asarray(wide)))
    token_to_slot = np.array([0, -1, 1, 0, 1, -1, 0, 0], np.int32)
    rerouted = dataclasses.replace(
        rows, row_to_esft_slot=jnp.asarray(token_to_slot), reroute_tables=jnp.asarray(tables)
    )
    got = np.asarray(plain(x, rerouted))
    want = [np.asarray(block(x, rows)) for block in merged]
    assert plain.experts.num_groups == 18
    for token, slot in enumerate(token_to_slot[:7]):
        np.testing.assert_array_equal(got[token], base[token] if slot < 0 else want[slot][token])
    assert (got[:7] != base[:7]).any(axis=1).tolist() == [s >= 0 for s in token_to_slot[:7]]
    np.testing.assert_array_equal(plain(x, rows)[:7], base[:7])  # no table: no adapter


def test_a_devices_tables_are_of_its_own_experts_in_its_own_indices():
    """12 experts on 3 devices: adapters' experts follow a device's 4 instead of all 12."""
    tables = np.tile(np.arange(12, dtype=np.int32), (1, 2, 1))
    tables[0, 1, 5], tables[0, 1, 11] = 12, 14
    tables = jnp.asarray(tables)
    own = inspect.unwrap(own_tables)  # a Split wants devices: its size is all that is asked for
    each = jax.vmap(lambda _: own(tables, SimpleNamespace(size=3)), axis_name=AXIS)
    got = np.asarray(each(jnp.arange(3)))
    assert got.shape == (3, 1, 2, 4)
    np.testing.assert_array_equal(got[:, 0, 0], [range(4)] * 3)
    np.testing.assert_array_equal(got[:, 0, 1], [[0, 1, 2, 3], [0, 4, 2, 3], [0, 1, 2, 6]])
