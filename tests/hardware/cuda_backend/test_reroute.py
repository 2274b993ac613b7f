"""Row map and reroute on Hopper are those of the reference, to the integer."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.cases.item_cases import check_items
from support.cases.kernel_calls import lora_kernel

import cuda_backend
from cuda_backend import ffi, lora_gemm
from cuda_backend import reroute as cuda
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.config import MoeConfig
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.moe import MoeBlock
from lora_jax.ops import adapter_items, dispatch
from lora_jax.ops.cases import POPULARITIES, lora_case, popular
from lora_jax.ops.reroute import reference
from lora_jax.ops.reroute.maps import RowMap


@lora_kernel
def cuda_lora(y, batch):
    """The kernel of one linear map."""
    return lora_gemm.lora_gemm((y,), batch)[0]


def same(got: RowMap, want: RowMap) -> None:
    for name in ("order", "inverse", "group_sizes", "row_to_token", "row_to_expert"):
        a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        np.testing.assert_array_equal(a, b, err_msg=name)
    if want.items is not None:
        np.testing.assert_array_equal(got.items.row_to_slot, want.items.row_to_slot)
        np.testing.assert_array_equal(got.items.order, np.arange(len(a)))
        count = int(got.items.num_items[0])
        check_items(np.asarray(got.items.items)[:count], want, most=32)


@pytest.mark.gpu
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(1, 1, 1), (5, 2, 8), (256, 8, 128), (257, 8, 128), (1000, 6, 63), (16384, 8, 64)],
)
def test_row_map_is_the_references(tokens, k, experts, popularity):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(popular(popularity, tokens * k, experts, rng).reshape(tokens, k))
    live = jnp.int32(max(1, tokens - 3))
    got = jax.jit(functools.partial(cuda.row_map, num_experts=experts))(ids, live)
    same(got, jax.jit(reference.row_map, static_argnums=2)(ids, live, experts))


def rerouted(tokens: int, slots: int, adapters: int) -> tuple[RowMap, RowMap]:
    """Return the kernel's map and the reference's."""
    rng = np.random.default_rng(1)
    experts, k, groups = 64, 6, 64 + slots * 13
    ids = jnp.asarray(rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32))
    owners = jnp.asarray(rng.integers(-1, slots + 1, tokens).astype(np.int32))
    table = jnp.asarray(rng.integers(0, groups, (slots, experts)).astype(np.int32))
    lora = jnp.asarray(rng.integers(-1, max(adapters, 1), tokens).astype(np.int32))

    def mapped(op, make_items):
        items = make_items(lora, adapters) if adapters else None
        return op(ids, owners, table, jnp.int32(tokens - 2), groups, items)

    mine = jax.jit(functools.partial(mapped, cuda.reroute, cuda.adapter_items))()
    return mine, jax.jit(functools.partial(mapped, reference.reroute, adapter_items.reference))()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 20, 1200])
@pytest.mark.parametrize("tokens", [7, 300, 5000])
def test_reroute_is_the_references(tokens, slots):
    same(*rerouted(tokens, slots, 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "adapters"), [(3, 1), (10, 4), (300, 100), (8192, 6), (9000, 6)]
)
def test_rows_of_adapters_stand_together_and_in_items(tokens, adapters):
    same(*rerouted(tokens, 20, adapters))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70, 3000, 9000])
def test_items_of_tokens_are_of_one_adapter_each(rows):
    slots = jnp.asarray(popular("zipf", rows, 40, np.random.default_rng(0)) - 1)
    got = jax.jit(cuda.adapter_items, static_argnums=1)(slots, 40)
    want = adapter_items.reference(slots, 40)
    np.testing.assert_array_equal(got.order, want.order)
    nowhere = jnp.zeros((rows,), jnp.int32)
    by_place = dataclasses.replace(want, row_to_slot=slots[want.order])
    map = RowMap(nowhere, nowhere, nowhere, nowhere, nowhere, by_place)
    check_items(np.asarray(got.items)[: int(got.num_items[0])], map, most=32)


@pytest.mark.gpu
@pytest.mark.parametrize("most_rank", [32, 64])  # up to which segments have a kernel, or not
@pytest.mark.parametrize("tokens", [5, 300, 2000, 3000])  # those of 2000 are in tiles
def test_a_row_has_the_same_bits_by_the_maps_items_as_by_its_own(tokens, most_rank):
    rng = np.random.default_rng(2)
    k, experts = 4, 8
    ranks = (16, 8, 0, most_rank)  # none so small that its share could be lost in rounding
    case = lora_case(tokens * k, 256, 128, ranks=ranks, num_experts=experts, dtype="bfloat16")
    num_slots = len(case.scaling)
    slots = jnp.asarray(rng.integers(-1, num_slots, tokens).astype(np.int32))
    ids = jnp.asarray(rng.integers(0, experts, (tokens, k)).astype(np.int32))

    @jax.jit
    def by_row(adapters):
        map = cuda.row_map(ids, jnp.int32(tokens - 1), experts, adapters)
        y, x, *pools = (v[map.order] if v.shape[0] == tokens * k else v for v in case.arrays[:6])
        owners = (slots[map.row_to_token], map.row_to_expert)
        done = cuda_lora(y, x, *pools, *owners, case.max_rank, items=map.items)
        return done[map.inverse].astype(jnp.float32)

    want = np.asarray(by_row(None)) if tokens * k <= lora_gemm.MAX_ROWS else None
    got = np.asarray(by_row(jax.jit(cuda.adapter_items, static_argnums=1)(slots, num_slots)))
    live = (tokens - 1) * k
    base = np.asarray(case.y.astype(jnp.float32))
    touched = np.array([*ranks, 0])[np.repeat(np.asarray(slots), k)] > 0
    np.testing.assert_array_equal((got != base).any(axis=1)[:live], touched[:live])
    if want is not None:
        np.testing.assert_array_equal(got[:live], want[:live])


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "most_rank"), [(64, 16), (64, 64), (16, 64)])
@pytest.mark.parametrize("percent", [0, 10, 50, 90, 100])  # of the tokens that have an adapter
def test_experts_rows_without_an_adapter_have_deltas_of_zeros(percent, experts, most_rank):
    """Whether all warps store them or some; the others have the bits that y = 0 gives them.

    With 16 experts some runs are bound to be long: they are tiles.
    """
    rng = np.random.default_rng(3)
    tokens, k = 1024, 8
    ranks = (16, 8, most_rank)
    case = lora_case(tokens * k, 768, 256, ranks=ranks, num_experts=experts, dtype="bfloat16")
    slots = rng.integers(0, len(ranks), tokens)
    slots[rng.integers(0, 100, tokens) >= percent] = -1
    ids = jnp.asarray(rng.integers(0, experts, (tokens, k)).astype(np.int32))

    @jax.jit
    def deltas(slots):
        adapters = cuda.adapter_items(slots, len(ranks), most_rank)
        map = cuda.row_map(ids, jnp.int32(tokens - 5), experts, adapters)
        _, x, *pools = case.arrays[:6]
        owners = (map.items.row_to_slot, map.row_to_expert)
        y = jnp.zeros((tokens * k, 768), jnp.bfloat16)
        given = (x, *pools, *owners, most_rank)
        done = [cuda_lora(y, *given, items=map.items) for y in (None, y)]
        return [y.astype(jnp.float32) for y in done], map.items.row_to_slot

    (alone, added), owners = jax.tree.map(np.asarray, deltas(jnp.asarray(slots, jnp.int32)))
    np.testing.assert_array_equal(alone, added)
    np.testing.assert_array_equal(alone.any(axis=1), owners >= 0)


@pytest.mark.parametrize(
    ("tokens", "k", "groups", "why"),
    [
        (0, 2, 8, "rows, not 0"),
        (1 << 18, 2, 8, "262144 rows, not 524288"),
        (2, 9000, 8, "8192 experts of a token, not 9000"),
        (8, 1, 0, "groups, not 0"),
        (8, 1, 20000, "16384 groups, not 20000"),
    ],
)
def test_declines_what_it_cannot_serve(tokens, k, groups, why):
    cuda.check_support(8, 1, 8)
    with pytest.raises(NotImplementedError, match=why):
        cuda.check_support(tokens, k, groups)


@pytest.mark.parametrize(
    ("tokens", "slots", "max_rank", "kind"),
    [
        (200, 1, 32, "segments"),
        (200, 1, 16, "items"),
        (200, 1, 64, "items"),
        (200, 4, 32, "items"),  # 32 runs, 16 rows each would be 512
        (60, 1, 32, "items"),  # 120 rows are few
        (255, 1, 64, "items"),
        (256, 1, 64, "tiles"),  # 8 runs of 64 rows
        (400, 1, 32, "segments"),
        (400, 1, 64, "tiles"),
        (400, 1, None, "tiles"),  # of ranks that nobody has told
        (5000, 1, 64, "items"),  # more rows than one CTA looks at
    ],
)
def test_rows_of_few_adapters_go_to_the_kernels_of_long_runs(
    monkeypatch, tokens, slots, max_rank, kind
):
    monkeypatch.setattr(ffi, "require", lambda: None)
    k, experts, width, bf16 = 2, 8, 64, jnp.bfloat16
    ids, owners = jnp.zeros((tokens, k), jnp.int32), jnp.zeros((tokens,), jnp.int32)
    x, pool = jnp.zeros((tokens * k, width), bf16), jnp.zeros((64 * experts, width), bf16)
    module = x, jnp.zeros((slots, 5), jnp.int32), jnp.ones((slots,), jnp.float32)

    def layer():
        adapters = cuda.adapter_items(owners, slots, max_rank)
        items = cuda.row_map(ids, jnp.int32(tokens), experts, adapters).items
        return lora_gemm.lora_pairs([module], x, pool, pool, items, max_rank or 64)

    text = str(jax.make_jaxpr(layer)())
    behind = text[text.index("target_name=lora_jax_cuda_row_map") :]
    found = "tiles" if "lora_jax_cuda_row_tiles" in behind else "items"
    assert ("segments" if "('segments', True)" in behind else found) == kind


def test_a_step_sorts_tokens_once_and_rows_once_a_layer(monkeypatch):
    """Traced as on a GPU: what calls there are, before XLA has shared any."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ffi, "require", lambda: None)
    ops = {"lora_gemm": lora_gemm.lora_gemm, "row_map": cuda.row_map}
    ops["adapter_items"] = cuda.adapter_items
    monkeypatch.setattr(dispatch, "_backend_ops", lambda name: ops)
    moe = MoeConfig(num_experts=64, top_k=2, intermediate_size=128, layers=(0, 1))
    dtype = jnp.dtype(jnp.bfloat16)
    blocks = [MoeBlock(64, moe, layer, dtype=dtype, rngs=nnx.Rngs(0)) for layer in (0, 1)]
    names = ("router", *(f"experts.{name}_proj" for name in ("gate", "up", "down")))
    pools = {str(width): jnp.zeros((8, width), dtype) for width in (64, 128)}
    entries, scaling = jnp.zeros((4, 2, 3, 5), jnp.int32), jnp.zeros((4, 2, 3), jnp.float32)
    slots = AdapterSlots(pools, entries, scaling)

    def step(x, row_to_slot):
        rows = AdapterRouting(jnp.int32(5), row_to_slot, slots, names, max_rank=8).with_items()
        for block in blocks:
            x = block(x, rows)
        return x

    text = str(jax.make_jaxpr(step)(jnp.zeros((6, 64), dtype), jnp.zeros((6,), jnp.int32)))
    calls = collections.Counter(re.findall("target_name=lora_jax_cuda_([a-z_]+)", text))
    assert calls == {"row_items": 1, "row_map": 2, "lora_gemm": 6}


def test_dispatch_is_offered_what_has_run_on_a_gpu():
    offered = {"lora_gemm", "merge", "adapter_items", "reroute", "row_map"}
    assert set(cuda_backend.kernels()) >= offered
