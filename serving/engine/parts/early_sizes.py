"""Sizes and modules that a config names, checked against a config.json before weights are read."""

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lora_jax.adapters.adapter_folders import check_tensors
from lora_jax.adapters.slot_sizes import size_slots
from lora_jax.config import ModelConfig
from lora_jax.models.registry import model_class
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.engine.memory.page_pool import check_kernels
from serving.engine.memory.sizing import cache_size, host_pages
from serving.engine.memory.storage import kv_dtype, lora_dtype
from serving.engine.parts.devices import local_widths
from serving.engine.parts.early_checks import limits_of
from serving.engine.parts.target_parts import open_modules


def check_sizes(
    config: EngineConfig,
    model: ModelConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    split: Split | None,
    *,
    alone: bool,
    reads: bool = True,
) -> None:
    """Raise the ValueError of a name of no module, of bytes that hold no page or no adapter, and of
    adapters whose tensors do not fit the model, as far as a second is enough to see it.

    Only what would be refused after the load is refused. Adapters of an engine that is not `alone`
    lie elsewhere, as a whole or in part, and without `reads` others read them; pages of a pool are
    counted when it is made.
    """
    kind = model_class(model.model_type)
    catalogue, names = kind.catalogue(model), config.lora_target_modules
    if names is not None and (kept := open_modules(catalogue, names, adapters.values())):
        catalogue = catalogue.only(kept)
    if reads and config.load_format != "dummy":
        check_tensors(adapters, limits_of(config), catalogue, (config.model_name,))
    dtype = _dtype_of(config, model)
    if dtype is None:
        return
    if config.page_pool_bytes is not None:
        if jax.default_backend() == "gpu":
            check_kernels(config, model, catalogue, dtype)
        return
    shape, devices = kind.kv_shape(model), config.tensor_parallel_size
    if config.kv_cache_memory_bytes is not None:
        per_token = shape.local(devices).bytes_per_token(kv_dtype(config, dtype))
        cache_size(config, per_token, model.max_positions)
    page_bytes = config.block_size * shape.bytes_per_token(kv_dtype(config, dtype))
    host_pages(config, page_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if alone and config.lora_memory_bytes is not None:
        widths = local_widths(split)
        local = catalogue if widths is None else widths.catalogue(catalogue)
        sizes = config.max_loras, config.max_lora_rank, lora_dtype(config, dtype).itemsize
        size_slots(local, *sizes, config.lora_memory_bytes)


def _dtype_of(config: EngineConfig, model: ModelConfig) -> jnp.dtype | None:
    """Return the dtype of the weights; None where only the files' headers tell."""
    name = model.dtype if config.dtype == "auto" else config.dtype
    if name is None:
        return None
    return jnp.dtype(jnp.bfloat16 if name == "bfloat16" else jnp.float32)
