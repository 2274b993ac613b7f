"""Row map and reroute on Hopper are those of the reference, to the integer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda_backend import reroute as cuda
from lora_jax.ops.cases import POPULARITIES, popular
from lora_jax.ops.reroute import reference


def same(got, want) -> None:
    for name, a, b in zip(("order", "inverse", "sizes"), got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


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
    same(got, reference.row_map(ids, live, experts))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 20, 200])
@pytest.mark.parametrize("tokens", [7, 300, 5000])
def test_reroute_is_the_references(tokens, slots):
    rng = np.random.default_rng(1)
    experts, k, groups = 64, 6, 64 + slots * 13
    ids = jnp.asarray(rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32))
    owners = jnp.asarray(rng.integers(-1, slots + 1, tokens).astype(np.int32))
    table = jnp.asarray(rng.integers(0, groups, (slots, experts)).astype(np.int32))
    live = jnp.int32(tokens - 2)
    got = jax.jit(functools.partial(cuda.reroute, num_groups=groups))(ids, owners, table, live)
    same(got, reference.reroute(ids, owners, table, live, groups))


@pytest.mark.parametrize(
    ("rows", "groups", "why"),
    [(0, 8, "rows, not 0"), (8, 0, "groups, not 0"), (8, 20000, "16384 groups, not 20000")],
)
def test_declines_what_it_cannot_serve(rows, groups, why):
    cuda.check_support(8, 8)
    with pytest.raises(NotImplementedError, match=why):
        cuda.check_support(rows, groups)
