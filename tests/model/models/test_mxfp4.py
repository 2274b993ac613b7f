"""MXFP4 dequantisation against a reference that decodes one nibble at a time from the format."""

import math

import ml_dtypes
import numpy as np
import pytest

from lora_jax.models.mxfp4 import dequantize

E2M1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def reference(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode in Python floats (float64), nibble by nibble."""
    out = np.zeros((*scales.shape, 32))
    for place in np.ndindex(*scales.shape):
        for i in range(32):
            byte = int(blocks[place][i // 2])
            nibble = byte >> 4 if i % 2 else byte & 0x0F
            sign = -1.0 if nibble & 8 else 1.0
            out[(*place, i)] = math.ldexp(sign * E2M1[nibble & 7], int(scales[place]) - 127)
    return out.reshape(*scales.shape[:-1], -1)


def make_case(shape: tuple[int, ...], low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return blocks, rng.integers(low, high, shape, dtype=np.uint8)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("span", [(110, 135), (2, 12), (245, 253)])
def test_values_are_exact(dtype, span):
    blocks, scales = make_case((3, 5, 2), *span)
    got = dequantize(blocks, scales, np.dtype(dtype))
    assert got.dtype == np.dtype(dtype)
    assert got.shape == (3, 5, 64)
    np.testing.assert_array_equal(got.astype(np.float64), reference(blocks, scales))


def test_every_code_and_sign_of_zero():
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 1, 16)
    scales = np.full((16, 1), 127, np.uint8)
    got, want = dequantize(blocks, scales, np.dtype(np.float32)), reference(blocks, scales)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_smallest_scale_keeps_subnormals():
    blocks, scales = make_case((1, 1, 1), 0, 1)
    got = dequantize(blocks, scales, np.dtype(np.float32))
    np.testing.assert_array_equal(got.astype(np.float64), reference(blocks, scales))
    assert np.count_nonzero(got) > 20


def test_chunks_join(monkeypatch):
    """A tensor larger than one chunk, with a ragged last chunk, gives the same values."""
    blocks, scales = make_case((2, 7, 3), 110, 135)
    monkeypatch.setattr("lora_jax.models.mxfp4._CHUNK_BYTES", 16 * 5)
    got = dequantize(blocks, scales, np.dtype(np.float32))
    np.testing.assert_array_equal(got, reference(blocks, scales))


def test_agrees_with_transformers():
    """Same values as the library that reads the hub files, which returns [experts, in, out]."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = make_case((2, 6, 3), 110, 135)
    want = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    got = dequantize(blocks, scales, np.dtype(np.float32))
    np.testing.assert_array_equal(got, want.numpy().transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((2, 3, 16), np.uint8), np.zeros((2, 4), np.uint8), r"\(2, 3, 16\).*\(2, 4\)"),
        (np.zeros((2, 3, 8), np.uint8), np.zeros((2, 3), np.uint8), r"\(2, 3, 8\)"),
        (np.zeros((2, 16), np.int8), np.zeros((2,), np.uint8), "int8"),
        (np.zeros((1, 16), np.uint8), np.full((1,), 255, np.uint8), "255"),
        (np.zeros((1, 16), np.uint8), np.full((1,), 253, np.uint8), "253"),
    ],
)
def test_bad_input_is_refused(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        dequantize(blocks, scales, np.dtype(np.float32))
