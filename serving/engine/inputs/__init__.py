"""Prompts, images and arguments of Python callers, checked before the engine. No jax."""
