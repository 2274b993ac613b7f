"""Decisions about functions, as pure functions over plain data; the simulator calls the same.

Nothing here imports jax, reads a clock or keeps state: times are arguments, in seconds.
"""
