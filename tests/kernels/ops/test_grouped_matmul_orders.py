"""The order of 4-bit codes on a device: other bytes, the same values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models import loader
from lora_jax.models.quantised.forms import SIGNED
from lora_jax.ops.grouped_matmul import CodedWeight, orders
from lora_jax.ops.grouped_matmul.orders import for_kernels
from lora_jax.ops.grouped_matmul.weights import (
    FRAGMENTS,
    LANES,
    QUADS,
    ROWS,
    in_fragments,
    in_lanes,
    in_quads,
    unpacked,
)

ORDERS = {"gpu": FRAGMENTS, "cpu": LANES}


def coded(d_in: int) -> CodedWeight:
    codes = jax.random.bits(jax.random.key(0), (3, 8, d_in // 2), jnp.uint8)
    scales = jax.random.uniform(jax.random.key(1), (3, 8, d_in // 16))
    return CodedWeight(codes, scales, None, SIGNED, jnp.dtype("float32"))


def test_fragments_are_what_the_docstring_says():
    codes = np.arange(64, dtype=np.uint8) % 16
    stored = np.asarray(in_fragments(jnp.asarray(codes[::2] | codes[1::2] << 4)))
    words = stored.view("<u4").reshape(2, 4)
    for piece, t, q, h in np.ndindex(2, 4, 4, 2):
        want = codes[32 * piece + 8 * q + 2 * t + h]
        assert words[piece, t] >> (16 * h + 4 * q) & 15 == want


def test_lanes_are_what_the_docstring_says():
    codes = np.arange(64, dtype=np.uint8) % 16
    stored = np.asarray(in_lanes(jnp.asarray(codes[::2] | codes[1::2] << 4))).reshape(2, 2, 8)
    for piece, p, i, h in np.ndindex(2, 2, 8, 2):
        assert stored[piece, p, i] >> 4 * h & 15 == codes[32 * piece + 16 * p + 8 * h + i]


def test_quads_are_what_the_docstring_says():
    codes = np.random.default_rng(0).integers(0, 16, 256, np.uint8)
    stored = np.asarray(in_quads(jnp.asarray(codes[::2] | codes[1::2] << 4)))
    words = stored.view("<u2").reshape(2, 32)
    for quad, i, q in np.ndindex(2, 32, 4):
        assert words[quad, i] >> 4 * q & 15 == codes[128 * quad + 32 * q + i]
    np.testing.assert_array_equal(unpacked(jnp.asarray(stored), QUADS), codes)


@pytest.mark.parametrize("reads", [True, False])
def test_whole_quads_are_for_kernels_that_read_them(reads, monkeypatch):
    monkeypatch.setattr(orders.build, "reads_quads", lambda: reads)
    w = coded(384)
    moved = for_kernels(w, "cpu")
    assert moved.order == (QUADS if reads else LANES)
    moved.check("w")
    np.testing.assert_array_equal(moved.plain(), w.plain())
    assert orders.order_of((3, 192), "gpu") == FRAGMENTS
    assert orders.order_of((3, 48), "cpu") == LANES


@pytest.mark.parametrize("backend", ORDERS)
def test_a_backend_has_the_same_values_in_its_order(backend):
    w = coded(96)
    moved = for_kernels(w, backend)
    assert (moved.order, moved.shape) == (ORDERS[backend], w.shape)
    assert (np.asarray(moved.codes) != np.asarray(w.codes)).any()
    np.testing.assert_array_equal(moved.plain(), w.plain())
    np.testing.assert_array_equal(unpacked(moved.codes, moved.order), unpacked(w.codes, ROWS))
    assert for_kernels(moved, backend) is moved


@pytest.mark.parametrize(("d_in", "backend"), [(96, "tpu"), (48, "cpu"), (48, "gpu")])
def test_elsewhere_and_in_half_a_fragment_rows_stay(d_in, backend):
    w = coded(d_in)
    assert for_kernels(w, backend) is w


def test_codes_that_a_host_places_are_reordered_there(monkeypatch):
    """As in an arena that other processes read: in the order of the backend's kernels."""
    w = coded(96)
    for backend, order in (*ORDERS.items(), ("tpu", ROWS)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        codes = np.array(w.codes)
        orders.put_in_order(codes)
        placed = orders.known_in_order(dataclasses.replace(w, codes=jnp.asarray(codes)))
        assert placed.order == order
        name = loader._label(
            "w", "codes", codes.shape
        )  # of the array, so that no reader mistakes it
        assert name == ("w#codes" if order == ROWS else f"w#codes.{order}")
        np.testing.assert_array_equal(placed.plain(), w.plain())


def test_a_plain_weight_stays():
    w = jnp.zeros((1, 8, 96))
    assert for_kernels(w, "gpu") is w
    assert orders.known_in_order(w) is w


def test_an_unknown_order_is_refused():
    w = coded(48)
    for order in ("columns", FRAGMENTS, LANES, QUADS):
        with pytest.raises(ValueError, match=f"order {order} of 48 codes"):
            CodedWeight(w.codes, w.scales, None, SIGNED, w.dtype, order).check("w")
