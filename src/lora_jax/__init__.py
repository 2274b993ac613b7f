"""LoRA and ESFT adapters over one base model, in JAX.

`lora_jax.function` is that of `serving.functions`, reached by name: imports point down.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "function":
        raise AttributeError(f"module 'lora_jax' has no attribute {name!r}")
    return importlib.import_module("serving.functions.app").function
