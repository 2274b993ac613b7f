"""Turns of functions on one device: their keeper, a function's side, messages and times. No jax."""
