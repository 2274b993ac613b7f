"""Row map and reroute in Mosaic GPU: interpreted on a CPU, lowered for CUDA, run on a GPU.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doubles.mosaic import interpreted
from support.drivers.lowering import launches

from lora_jax.ops import adapter_items
from lora_jax.ops.cases import popular
from lora_jax.ops.reroute import RowMap, pallas_gpu, reference, row_map
from lora_jax.ops.reroute._gpu_kernels import RerouteConfig
from lora_jax.ops.reroute.pallas_gpu import find_config

# In jit: op by op they are thirty to fifty programs.
jitted = functools.partial(jax.jit, static_argnames=("groups", "config", "interpret"))


@jitted
def mapped(ids, num_tokens, groups, config=None, interpret=None):
    return pallas_gpu.row_map(ids, num_tokens, groups, config=config, interpret=interpret)


@jitted
def rerouted(ids, owners, table, num_tokens, groups, config=None, interpret=None):
    options = {"config": config, "interpret": interpret}
    return pallas_gpu.reroute(ids, owners, table, num_tokens, groups, **options)


want_map = jax.jit(reference.row_map, static_argnums=2)
want_reroute = jax.jit(reference.reroute, static_argnums=4)


def some_ids(tokens: int, k: int, experts: int, popularity: str = "zipf") -> jax.Array:
    """Return ids by popularity, and some that are no expert's."""
    rng = np.random.default_rng(0)
    ids = popular(popularity, tokens * k, experts, rng).reshape(tokens, k).astype(np.int32)
    return jnp.asarray(np.where(rng.random(ids.shape) < 0.05, experts + 7, ids))


def some_owners(tokens: int, experts: int, slots: int, groups: int) -> tuple[jax.Array, jax.Array]:
    """Return token_to_slot and a table, with slots and groups that are none."""
    rng = np.random.default_rng(1)
    table = np.tile(np.arange(experts, dtype=np.int32), (slots, 1))
    own = rng.random(table.shape) < 0.4
    table[own] = rng.integers(-2, groups + 2, own.sum())
    owners = rng.integers(-2, slots + 1, tokens).astype(np.int32)
    return jnp.asarray(owners), jnp.asarray(table)


def check(got: RowMap, want: RowMap) -> None:
    """Hold all five arrays to the reference's, number by number."""
    for name in ("order", "inverse", "group_sizes", "row_to_token", "row_to_expert"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert got.items is None


# tokens, k, groups, real tokens; how they are shared out: one CTA, and several.
INTERPRETED = [
    (20, 3, 9, 17, RerouteConfig(1, 1)),
    (33, 3, 70, 33, RerouteConfig(2, 1)),
    (40, 4, 64, 31, RerouteConfig(1, 2)),
]


@pytest.mark.parametrize(("tokens", "k", "groups", "real", "config"), INTERPRETED, ids=str)
def test_interpreted_row_map_is_the_reference(tokens, k, groups, real, config):
    ids, num_tokens = some_ids(tokens, k, groups), jnp.int32(real)
    with interpreted() as interpret:
        got = jax.block_until_ready(mapped(ids, num_tokens, groups, config, interpret))
    check(got, want_map(ids, num_tokens, groups))


@pytest.mark.parametrize(("tokens", "k", "groups", "real", "config"), INTERPRETED[:2], ids=str)
def test_interpreted_reroute_is_the_reference(tokens, k, groups, real, config):
    experts = groups - 4
    ids, num_tokens = some_ids(tokens, k, experts), jnp.int32(real)
    owners = some_owners(tokens, experts, 3, groups)
    with interpreted() as interpret:
        call = rerouted(ids, *owners, num_tokens, groups, config, interpret)
        got = jax.block_until_ready(call)
    check(got, want_reroute(ids, *owners, num_tokens, groups))


@pytest.mark.parametrize("name", ["one CTA", "several"])
def test_lowers_for_cuda_at_real_sizes(name):
    """One launch where a CTA takes all rows; else the counts of each come first."""
    i32, shape = jnp.int32, jax.ShapeDtypeStruct
    tokens, groups, ctas = (64, 128, 1) if name == "one CTA" else (16384, 1023, 128)
    ids, num_tokens = shape((tokens, 8), i32), shape((), i32)
    if name == "one CTA":
        made = launches(lambda *args: mapped(*args, groups, interpret=False), ids, num_tokens)
    else:
        args = ids, shape((tokens,), i32), shape((20, 128), i32), num_tokens
        made = launches(lambda *args: rerouted(*args, groups, interpret=False), *args)
    kernels = ["_place_kernel"] if ctas == 1 else ["_count_kernel", "_place_kernel"]
    assert [launch.name for launch in made] == kernels
    for launch in made:
        assert launch.grid == (ctas, 1, 1)
        assert launch.threads == 128 * find_config(tokens * 8).warpgroups
        assert launch.shared_bytes <= 227 * 1024
    # A number goes where it belongs if that is somewhere: four arrays of rows, and the sizes.
    numbers = find_config(tokens * 8).pieces * 64 // 32
    assert made[-1].operations["if"] >= 4 * numbers


@pytest.mark.parametrize(
    ("rows", "ctas"),
    [(1, 1), (64, 1), (65, 1), (1024, 1), (1025, 5), (8192, 32), (33000, 65), (1 << 18, 256)],
)
def test_rows_are_shared_out_among_ctas(rows, ctas):
    config = find_config(rows)
    assert -(-rows // config.rows) == ctas
    assert config.pieces <= 4


@pytest.mark.parametrize(
    ("tokens", "groups", "why"),
    [
        (4, 1024, "1 to 1023 groups, not 1024"),
        (0, 8, "1 to 262144 rows, not 0"),
        ((1 << 18) + 1, 8, "1 to 262144 rows, not 262145"),
    ],
)
def test_declines_what_it_cannot_serve(tokens, groups, why):
    ids = jnp.zeros((tokens, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=why):
        pallas_gpu.row_map(ids, jnp.int32(4), groups, interpret=False)


def test_declines_adapters():
    adapters = adapter_items.reference(jnp.zeros(4, jnp.int32), 2)
    with pytest.raises(NotImplementedError, match="no items of adapters"):
        pallas_gpu.row_map(jnp.zeros((4, 2), jnp.int32), jnp.int32(4), 8, adapters, interpret=False)


def test_declines_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        row_map(jnp.zeros((4, 2), jnp.int32), jnp.int32(4), 8, implementation="pallas_gpu")


# tokens, k, groups, real tokens
REAL = [
    (1, 8, 128, 1),
    (37, 6, 64, 30),
    (64, 8, 128, 64),
    (300, 8, 1023, 290),
    (1024, 8, 128, 1000),
    (16384, 8, 388, 16384),
    (32768, 8, 128, 32000),
]


@pytest.mark.gpu
@pytest.mark.parametrize("popularity", ["uniform", "zipf", "identical"])
@pytest.mark.parametrize(("tokens", "k", "groups", "real"), REAL)
def test_on_a_gpu_is_the_reference(tokens, k, groups, real, popularity):
    experts = max(1, groups * 3 // 4)
    ids, num_tokens = some_ids(tokens, k, experts, popularity), jnp.int32(real)
    check(mapped(ids, num_tokens, groups), want_map(ids, num_tokens, groups))
    owners = some_owners(tokens, experts, 20, groups)
    got = rerouted(ids, *owners, num_tokens, groups)
    check(got, want_reroute(ids, *owners, num_tokens, groups))
