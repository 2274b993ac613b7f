"""Dense maps of a batch on Hopper: the bits of Mosaic's kernel, by tiles of every width."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops import dispatch
from lora_jax.ops.grouped_matmul import grouped_matmul, joined_matmul, matmul

# d_out, d_in; tiles of 16, 32 and 48 columns
SIZES = [(2048, 4096), (4096, 1024), (4096, 192), (6144, 320), (1088, 64), (24, 64)]
COUNTS = [(9, 9), (16, 12), (64, 33), (128, 64), (128, 65), (100, 100), (128, 128)]


def drawn(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def weight(seed: int, d_out: int, d_in: int) -> jax.Array:
    return drawn(seed, 1, d_out, d_in) * d_in**-0.5


def same_bits(got, want) -> None:
    got, want = (np.asarray(a).view(np.int16) for a in (got, want))
    np.testing.assert_array_equal(got, want)


def check(op, *args) -> None:
    same_bits(op(*args, implementation="cuda"), op(*args, implementation="pallas_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("d_out", "d_in"), SIZES)
def test_products_have_the_bits_of_mosaics(d_out, d_in):
    """Alone, and beside a bias and an addend of either dtype."""
    w, bias = weight(1, d_out, d_in), drawn(2, 1, d_out)
    dtypes = itertools.cycle((jnp.float32, jnp.bfloat16))
    for (rows, count), dtype in zip(COUNTS, dtypes, strict=False):
        x, sizes = drawn(3, rows, d_in), jnp.array([count], jnp.int32)
        check(grouped_matmul, x, w, sizes)
        if d_out >= 64:  # Mosaic's kernel pads a bias to whole tiles
            check(grouped_matmul, x, w, sizes, bias, drawn(4, rows, d_out, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("d_in", [2048, 320])
def test_maps_of_one_x_have_the_bits_that_each_has_alone(d_in):
    ws = [weight(seed, d_out, d_in)[0] for seed, d_out in enumerate((4096, 1024, 1024))]
    x, none = drawn(3, 128, d_in), (None,) * 3
    for count in (jnp.int32(60), jnp.int32(70)):
        together = joined_matmul(x, ws, count, none, implementation="cuda")
        for got, w in zip(together, ws, strict=True):
            same_bits(got, matmul(x, w, count, implementation="pallas_gpu"))


@pytest.mark.gpu
def test_wider_maps_are_mosaics():
    with pytest.raises(dispatch.Declined, match="up to 132 tiles of 48 columns, not 300 of 14336"):
        matmul(drawn(0, 64, 64), weight(1, 14336, 64)[0], jnp.int32(64), implementation="cuda")


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_company():
    """Also behind an x that is written just before, as in a step."""
    w = weight(1, 4096, 2048)[0]

    @jax.jit
    def step(x, count):
        return matmul(jnp.tanh(x), w, count, implementation="cuda")

    x = drawn(3, 128, 2048)
    whole = step(x, jnp.int32(128))
    for rows, count in ((9, 9), (32, 30), (64, 64), (128, 3)):
        some = step(x[:rows], jnp.int32(count))
        same_bits(some[:count], whole[:count])
        assert not np.asarray(some[count:], np.float32).any()
