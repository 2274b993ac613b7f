"""Adapters of a server over its processes and restarts: run-time loads, rollouts. No jax."""
