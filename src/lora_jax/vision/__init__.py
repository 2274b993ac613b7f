"""Images before the device: sizes, pixels, patches and positions. No jax."""
