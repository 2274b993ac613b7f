"""A model of random weights, made on its devices from config.json alone, to measure speed with.

vLLM's `--load-format dummy`. Weights are drawn so that activations keep their size: an adapter or
a kernel that is wrong still shows, and no number is denormal or infinite.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.config import ModelConfig
from lora_jax.models.loader import read_config, supported_dtype
from lora_jax.models.registry import abstract, stored_shape
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.sharding import Split, put, weight_sharding

SEED = 0
BIAS_STD = 0.02


def make_dummy(
    path: str | Path, *, dtype: Any = None, split: Split | None = None
) -> tuple[AbstractCausalLM, ModelConfig]:
    """Return the model of a folder's config with random weights, the same ones every time.

    Matrices are normal with deviation d_in**-0.5, norms are 1, biases normal with BIAS_STD. All
    numbers are ones of `dtype`, as in a checkpoint, also of a router, which is kept in float32.
    `dtype` None is the config's, float32 where it names none. Raises ValueError as `load` does.
    """
    config = read_config(Path(path))
    wanted = supported_dtype(dummy_dtype(config) if dtype is None else dtype)
    graphdef, state = abstract(config, wanted, split)
    arrays = []
    for index, (name, param) in enumerate(nnx.to_flat_state(state)):
        axes, shape = param.get_metadata()["logical_axes"], tuple(param.shape)
        mean, deviation = _moments(str(name[-1]), shape)
        key = jax.random.key(SEED + index, impl="rbg")
        dtypes = wanted, jnp.dtype(param.dtype)
        draw = _drawer(stored_shape(param, config), *dtypes, jax.local_devices()[0])
        drawn = draw(key, mean, deviation)
        if split is not None:  # drawn in parts, the values would be others
            rows = shape[0] - drawn.shape[0]
            drawn = jnp.pad(drawn, ((0, rows), *((0, 0),) * (drawn.ndim - 1))) if rows else drawn
            drawn = put(drawn, weight_sharding(axes, shape, split)).block_until_ready()
        arrays.append((name, param.replace(drawn)))
    return nnx.merge(graphdef, nnx.from_flat_state(arrays)), config


def dummy_dtype(config: ModelConfig) -> jnp.dtype:
    """Return the dtype of a made-up model that nobody gave one."""
    return jnp.dtype(jnp.bfloat16 if config.dtype == "bfloat16" else jnp.float32)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return mean and deviation of a parameter by its own name and shape."""
    if name == "weight" and len(shape) == 1:
        mean, deviation = 1.0, 0.0  # a norm's
    elif name.endswith("weight") or name.endswith("proj"):
        mean, deviation = 0.0, shape[-1] ** -0.5
    else:
        mean, deviation = 0.0, BIAS_STD
    return jnp.float32(mean), jnp.float32(deviation)


@functools.lru_cache(maxsize=64)
def _drawer(shape: tuple[int, ...], dtype: jnp.dtype, kept: jnp.dtype, device: Any):  # a jax.Device
    """Return a program that draws one parameter on a device; equal ones are compiled once.

    Its numbers are ones of `dtype`; the parameter itself has the dtype `kept`.
    """

    def draw(key, mean, deviation):
        # In its own dtype: an expert tensor in float32 beside it would need thrice its bytes.
        noise = jax.random.normal(key, shape, dtype)
        return (noise * deviation.astype(dtype) + mean.astype(dtype)).astype(kept)

    return jax.jit(draw, out_shardings=jax.sharding.SingleDeviceSharding(device))
