"""LoRA and ESFT adapters over one base model, in JAX: models, ops and file formats.

- `lora_jax.ops`: one folder per op, its meaning in `reference.py`, and its kernels
- `lora_jax.nn`, `lora_jax.models`: layers, and one file per model
- `lora_jax.adapters`: adapter files, the registry of names, adapter slots
- `lora_jax.memory`: virtual memory of host and devices
- `lora_jax.finetune`: training and export of adapters

The server and the engine are in the package `serving`. `lora_jax.function(adapter)` returns an
isolated function of an adapter (`serving.functions`). It is imported at its first use, because this
package imports nothing of `serving` otherwise.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "function":
        raise AttributeError(f"module 'lora_jax' has no attribute {name!r}")
    return importlib.import_module("serving.functions.app").function
