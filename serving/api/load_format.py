"""Load formats: sources of the weights of a base model and its adapters."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

from lora_jax.adapters import reader
from lora_jax.adapters.dummy import DummyAdapters
from lora_jax.adapters.formats.file_layouts import FileLayouts
from lora_jax.adapters.weights import AnyWeights
from lora_jax.config import ModelConfig
from lora_jax.models import load, make_dummy
from lora_jax.models.checkpoint import Checkpoint
from lora_jax.models.dummy import dummy_dtype
from lora_jax.models.loader import checkpoint_dtype
from lora_jax.nn.decoder import AbstractCausalLM


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Files, or configs alone (`made_up`): then matrices are random, those of adapters shared."""

    made_up: bool
    load_model: Callable[..., tuple[AbstractCausalLM, ModelConfig]]
    model_dtype: Callable[[ModelConfig, Path], jnp.dtype]  # of a folder's model, as it is loaded
    read_adapter: Callable[..., AnyWeights]
    is_shared: bool = False  # the weights are in memory that other processes read too


def weight_source(load_format: str) -> WeightSource:
    """Return what a `load_format` of EngineConfig asks for."""
    if load_format == "dummy":
        adapters = DummyAdapters()
        return WeightSource(True, make_dummy, lambda config, _: dummy_dtype(config), adapters.read)
    read = functools.partial(reader.read, layouts=FileLayouts())
    return WeightSource(False, load, _dtype_of_files, read)


def _dtype_of_files(config: ModelConfig, folder: Path) -> jnp.dtype:
    return checkpoint_dtype(config, Checkpoint(folder))
