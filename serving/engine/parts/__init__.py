"""Builds the parts of an engine at its start: base model, steps, heads, devices, registries."""
