"""Angles of rotary position embedding: default, linear, llama3 and YaRN frequencies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lora_jax.config import RopeConfig
from lora_jax.typing import Array, Float, Int


def inverse_frequencies(config: RopeConfig) -> np.ndarray:
    """Return f32 [dim / 2] radians per position, computed in float64 and rounded once."""
    base = config.theta ** -(np.arange(0, config.dim, 2, dtype=np.float64) / config.dim)
    scaled = {
        "default": lambda: base,
        "linear": lambda: base / config.factor,
        "llama3": lambda: _llama3(base, config),
        "yarn": lambda: _yarn(base, config),
    }[config.kind]()
    return scaled.astype(np.float32)


def _llama3(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Low frequencies divided by factor, high ones kept, those between interpolated."""
    turns = config.original_max_positions * base / (2 * math.pi)  # over the trained context
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (keep + (1 - keep) / config.factor)


def _yarn(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Dimensions that turn often are kept, those that turn rarely divided by factor, with a ramp.

    The ramp runs between the dimensions that turn beta_fast and beta_slow times over the trained
    context; `truncate` rounds its ends outwards to whole dimensions.
    """

    def dimension(turns: float) -> float:
        periods = config.original_max_positions / (turns * 2 * math.pi)
        return config.dim * math.log(periods) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(config.dim // 2) - low) / span, 0.0, 1.0)
    return base * ((1 - ramp) + ramp / config.factor)


def cos_sin(
    config: RopeConfig, positions: Int[Array, "tokens"]
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """Return cos and sin of every token's angles, in float32, times the config's magnitude."""
    frequencies = jnp.asarray(inverse_frequencies(config))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    magnitude = jnp.float32(config.magnitude)
    return computed_once(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def computed_once(
    cos: Float[Array, "rows half"], sin: Float[Array, "rows half"]
) -> tuple[Float[Array, "rows half"], Float[Array, "rows half"]]:
    """Return both as they are; on a CPU each program computes them once.

    XLA would compute them anew in each fusion that reads them: for q and for k of every layer, on a
    CPU by calls of sincosf.
    """
    if jax.default_backend() != "cpu":
        return cos, sin
    return lax.optimization_barrier((cos, sin))


def frequency_axes(config: RopeConfig) -> np.ndarray:
    """Return int32 [dim / 2]: whether a frequency turns by time (0), row (1) or column (2)."""
    if config.sections is None:
        return np.zeros(config.dim // 2, np.int32)
    if not config.interleaved_sections:
        return np.repeat(np.arange(3, dtype=np.int32), config.sections)
    axes = np.zeros(config.dim // 2, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * config.sections[axis] : 3] = axis
    return axes


def cos_sin_of_three(
    config: RopeConfig, positions: Int[Array, "3 tokens"]
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """Return cos and sin where time, row and column each have their frequencies (M-RoPE).

    Tokens whose three positions are equal get the bits of `cos_sin`.
    """
    chosen = positions.astype(jnp.float32)[frequency_axes(config)].T
    angles = chosen * jnp.asarray(inverse_frequencies(config))[None]
    magnitude = jnp.float32(config.magnitude)
    return computed_once(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)
