"""Calls of a batch's dense maps: operands, and what is left to other kernels."""

import jax
import jax.numpy as jnp
import pytest
from support.checks.handlers import assert_served
from support.drivers.lowering import custom_calls

from cuda_backend import dense_rows, grouped_matmul
from lora_jax.ops import dispatch

BF16, F32 = jnp.bfloat16, jnp.float32


def array(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


COUNT, NONE = array(1, dtype=jnp.int32), "0xbf16"


def only_call(op, *args):
    (call,) = custom_calls(op, *args)
    assert_served(call)
    assert call.target == "lora_jax_cuda_dense_rows"
    assert (call.aliases, call.attributes) == ({}, {})
    return call


def test_a_map_comes_with_its_bias_and_its_addend(on_hopper):
    given = array(20, 128), array(1, 256, 128), COUNT, array(1, 256), array(20, 256, dtype=F32)
    call = only_call(grouped_matmul.grouped_matmul, *given)
    weights, biases = ("256x128xbf16", NONE, NONE), ("1x256xbf16", NONE, NONE)
    assert call.operands == ("20x128xbf16", "1xi32", *weights, *biases, "20x256xf32")
    assert call.results == ("20x256xbf16", NONE, NONE)


def test_maps_of_one_x_share_a_call(on_hopper):
    ws = tuple(array(width, 128) for width in (4096, 1024, 1024))

    def maps(x, ws, count):
        return grouped_matmul.joined_matmul(x, ws, count, (None,) * 3)

    call = only_call(maps, array(128, 128), ws, array(dtype=jnp.int32))
    weights = ("4096x128xbf16", "1024x128xbf16", "1024x128xbf16")
    assert call.operands == ("128x128xbf16", "1xi32", *weights, NONE, NONE, NONE, NONE)
    assert call.results == ("128x4096xbf16", "128x1024xbf16", "128x1024xbf16")


@pytest.mark.parametrize(
    ("rows", "weights", "why"),
    [
        (129, [array(1, 256, 128)], "1 to 128 rows, not 129"),
        (0, [array(1, 256, 128)], "1 to 128 rows, not 0"),
        (64, [array(2, 256, 128)], "one group, not 2"),
        (64, [array(1, 256, 128, dtype=F32)], "bfloat16, not ShapeDtypeStruct of float32"),
        (64, [array(1, 256, 96)], "d_in in steps of 64 and d_out .* not 96 and 256"),
        (64, [array(1, 264, 128)], "above 64 in steps of 64, not 128 and 264"),
        (64, [array(1, 64, 128), array(1, 0, 128)], "not 128 and 64, 0"),
        (64, [array(1, 4096, 128)] * 2, "up to 132 tiles of 48 columns, not 172 of 4096, 4096"),
        (64, [array(1, 64, 128)] * 4, "up to 3 maps, not 4"),
    ],
)
def test_declines_what_others_serve_better(rows, weights, why):
    d_in = weights[0].shape[2]
    with pytest.raises(dispatch.Declined, match=why):
        dense_rows.check_support(array(rows, d_in), tuple(weights))
