"""KV pages: their holders, extents with memory, prefixes, host memory, the budget. No jax."""
