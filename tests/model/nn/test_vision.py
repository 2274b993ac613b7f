"""Activations, axial angles and pixels of the towers; whole towers are tested with their models."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch
from support.cases.vision_configs import TOWER

from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vision import (
    TowerInputs,
    at_rows,
    axial_cos_sin,
    gelu,
    normalised,
    quick_gelu,
)
from lora_jax.ops.grouped_matmul import gelu_tanh
from lora_jax.vision.processor import Patches, ProcessorSettings

CONFIG = dataclasses.replace(TOWER, hidden_size=16, num_heads=2, patch_size=2)
X = np.linspace(-6, 6, 101, dtype=np.float32)


def test_activations_are_torch_s():
    x = torch.from_numpy(X)
    wanted = {
        "tanh": torch.nn.functional.gelu(x, approximate="tanh"),
        "exact": torch.nn.functional.gelu(x),
        "quick": x * torch.sigmoid(1.702 * x),
    }
    got = {
        "tanh": gelu_tanh(jnp.asarray(X)),
        "exact": gelu(jnp.asarray(X)),
        "quick": quick_gelu(jnp.asarray(X)),
    }
    for name, want in wanted.items():
        np.testing.assert_allclose(np.asarray(got[name]), want.numpy(), atol=2e-6)


def test_angles_are_of_row_then_column():
    cos, sin = axial_cos_sin(CONFIG, jnp.asarray([[3, 5]], jnp.int32))
    want = np.array([3, 3 * 1e4**-0.5, 5, 5 * 1e4**-0.5])
    np.testing.assert_allclose(np.asarray(cos)[0], np.cos(want), atol=1e-6)
    np.testing.assert_allclose(np.asarray(sin)[0], np.sin(want), atol=1e-6)


def test_pixels_on_the_device_have_the_bits_of_the_host():
    settings = ProcessorSettings(
        "qwen3_vl", 2, 2, 2, 4, 64, 0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)
    )
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12), np.uint8)
    zeros = jnp.zeros((5, 4), jnp.int32)
    inputs = TowerInputs(
        patches=jnp.asarray(pixels),
        values=jnp.asarray(settings.values),
        positions=zeros[:, :2],
        valid=jnp.ones(5, bool),
        num_patches=jnp.int32(5),
        cells=zeros[:1, 0],
        table_rows=zeros,
        table_weights=zeros.astype(jnp.float32),
    )
    want = Patches(pixels, (1, 5)).normalised(settings)
    np.testing.assert_array_equal(np.asarray(normalised(CONFIG, inputs)), want)


def test_other_rows_of_an_image_keep_its_adapter():
    routing = AdapterRouting(jnp.int32(8), jnp.full(8, 2, jnp.int32), None, (), 4)
    other = at_rows(routing, 3, jnp.int32(2))
    assert other.row_to_slot.tolist() == [2, 2, 2]
    assert dataclasses.asdict(other)["num_rows"] == 2
