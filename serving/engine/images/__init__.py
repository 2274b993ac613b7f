"""Images before the engine: decoded within bounds, prepared, placed in prompts. No jax."""
