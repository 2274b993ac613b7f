"""Adapters in host memory: reads from the disk, copies, and the room that they share. No jax."""
