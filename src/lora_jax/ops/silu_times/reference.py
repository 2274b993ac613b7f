"""silu(gate) * up in plain jnp: the meaning of the op."""

import jax.numpy as jnp

from lora_jax.typing import Array, Float, Int


def silu_times(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
) -> Float[Array, "rows width"]:
    """y[t] = gate[t] / (1 + exp(-gate[t])) * up[t] in float32, rounded once; 0 from num_rows on."""
    wide = gate.astype(jnp.float32)
    y = (wide / (1 + jnp.exp(-wide)) * up.astype(jnp.float32)).astype(gate.dtype)
    rows = jnp.arange(gate.shape[0], dtype=jnp.int32)
    return jnp.where((rows < num_rows)[:, None], y, 0)
