"""Entries of adapters without matrices, for books of host memory."""

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights


def entry(name: str, digest: str, num_bytes: int, *, pinned: bool = False, owner: str = ""):
    of_files = AdapterKind.LORA, name, digest, {}, num_bytes, num_bytes, {}, 1, 0, None, None
    weights = AdapterWeights({}, AdapterReport(*of_files))
    return AdapterEntry(name, AdapterKind.LORA, digest, 1, weights, pinned, name, owner=owner)
