"""The tower with a gradient gives what the served one gives, with an adapter and without."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.drivers.vision_driver import Tower, picture

from lora_jax.finetune.lora_params import LoraSpec, init_lora, trained_delta
from lora_jax.finetune.pictures.tower import tower_rows
from lora_jax.vision.processor import preprocess


@pytest.mark.long
def test_rows_are_the_served_tower_s(picture_base):
    base, images = picture_base, [picture(64, 64, seed) for seed in range(3)]
    patches = [preprocess(image, base.settings) for image in images]
    served = Tower(base.model, base.model.config, base.settings)
    want = np.concatenate([served(p) for p in patches])
    pixels = jnp.asarray(np.stack([p.pixels for p in patches]))
    values = jnp.asarray(base.settings.values)
    got = tower_rows(base.model.tower, pixels, values, patches[0].grid)
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.long
def test_lora_on_the_tower_changes_them(picture_base):
    base, values = picture_base, jnp.asarray(picture_base.settings.values)
    catalogue = base.model.catalogue(base.model.config)
    spec = LoraSpec(2, 4.0, ("visual.attn.qkv",))
    start = init_lora(spec, catalogue, 0)
    pair = start["visual.attn.qkv"]
    changed = {"visual.attn.qkv": type(pair)(pair.a, pair.b + 0.1)}
    image = preprocess(picture(64, 64), base.settings)
    pixels = jnp.asarray(image.pixels[None])

    def rows(params):
        delta = trained_delta(params, spec, catalogue)
        return tower_rows(base.model.tower, pixels, values, image.grid, delta)

    plain = tower_rows(base.model.tower, pixels, values, image.grid)
    np.testing.assert_array_equal(rows(start), plain)
    assert float(jnp.abs(rows(changed) - plain).max()) > 1e-4
