"""Sizes of the engine's memory: weights, KV pages, adapters, and the pool that they share."""
