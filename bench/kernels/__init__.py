"""Kernels on one GPU against their floors: `python -m bench.kernels --out DIR`."""
