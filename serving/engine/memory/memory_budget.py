"""Device memory budget of KV pages and adapter slots."""

import dataclasses
import logging
import os

import jax
import jax.numpy as jnp

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.slots import SlotsSpec, rows_per_adapter, saved_rows, size_slots
from lora_jax.config import ModelConfig
from lora_jax.memory.platforms import for_platform
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.rank_rows import rows_nbytes
from serving.api.config import EngineConfig
from serving.engine.memory.sizing import (
    LORA_SHARE,
    CacheSize,
    adapter_bytes,
    cache_size,
    free_bytes,
    host_pages,
    kv_bytes,
    shortage_line,
    whole_adapters,
)
from serving.engine.memory.step_arrays import step_bytes
from serving.engine.memory.storage import kv_dtype, lora_dtype
from serving.runtime import xla_memory

logger = logging.getLogger(__name__)


def size_kv_cache(
    config: EngineConfig,
    model: AbstractCausalLM,
    model_config: ModelConfig,
    local_catalogue: LoraCatalogue,
    dtype: jnp.dtype,
    num_full_adapters: int = 0,
    encoder_bytes: int = 0,
    devices: int = 1,
    *,
    share: float = LORA_SHARE,
    rank: int | None = None,
) -> CacheSize:
    """Return the KV pages that the budget or the device's memory has room for.

    Adapters take of it what `make_allocator` gives them for the same arguments (`share`, `rank`),
    and rows of images `encoder_bytes`. Of a model over several devices all bytes
    are those of one, as are the widths of the catalogue.
    """
    shape = model.kv_shape(model_config).local(devices)
    per_token = shape.bytes_per_token(kv_dtype(config, dtype))

    def size_beside(step: int) -> CacheSize:
        free = free_device_bytes(config, step)
        if free is not None:
            one = _one_adapter_bytes(config, local_catalogue, dtype)
            usual = _one_adapter_bytes(config, local_catalogue, dtype, rank)
            slots = adapter_bytes(config, one, free, share, usual)
            if num_full_adapters:
                slots += num_full_adapters * _one_adapter_bytes(
                    config, model.catalogue(model_config), dtype
                )
            slots += rows_nbytes(saved_rows(local_catalogue), lora_dtype(config, dtype).itemsize)
            free = kv_bytes(free, slots + encoder_bytes)
        return cache_size(config, per_token, model_config.max_positions, free, step)

    size = size_beside(0)
    if free_device_bytes(config) is not None and not config.kv_cache_memory_bytes:
        # Arrays of a step shorten the longest sequence, never lengthen it: this is enough for both.
        longest = size.max_model_len
        size = size_beside(step_bytes(config, model_config, shape, dtype, longest, devices))
    whole = model.kv_shape(model_config).bytes_per_token(kv_dtype(config, dtype))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = host_pages(config, size.page_size * whole, memory)
    _log_sizes(size, per_token, count, count * size.page_size * whole)
    return dataclasses.replace(size, num_host_pages=count)


def _log_sizes(size: CacheSize, per_token: int, num_host: int, host_bytes: int) -> None:
    logger.info(
        "KV cache: %d pages of %d tokens, %.1f MB; sequences of up to %d tokens.",
        size.num_pages,
        size.page_size,
        size.num_pages * size.page_size * per_token / 1e6,
        size.max_model_len,
    )
    if num_host:
        logger.info("KV pages in host memory: %d, %.1f MB.", num_host, host_bytes / 1e6)


def bytes_limit() -> int | None:
    """Return what JAX may use of a device; None where it has no bound of its own."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or None


def free_device_bytes(config: EngineConfig, step: int = 0) -> int | None:
    """Return what the loaded weights leave, or None where memory has no limit.

    `step` bytes at least stay for a step's own arrays.

    Where XLA has no limit of its own (its allocator "cuda_async"), or took all that it may at the
    start, it is what the driver has left.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    if not stats["bytes_limit"] or xla_memory.is_bounded():
        free = for_platform(jax.default_backend()).usage().device_free
        return None if free is None else free_bytes(config, free, 0, step)
    return free_bytes(config, stats["bytes_limit"], stats["bytes_in_use"], step)


def _one_adapter_bytes(
    config: EngineConfig, catalogue: LoraCatalogue, dtype: jnp.dtype, rank: int | None = None
) -> int:
    """Return what an adapter of `rank`, by default max_lora_rank, on every module takes."""
    rows = rows_per_adapter(catalogue, rank or config.max_lora_rank)
    return rows_nbytes(rows, lora_dtype(config, dtype).itemsize)


def make_allocator(
    config: EngineConfig,
    catalogue: LoraCatalogue,
    local_catalogue: LoraCatalogue,
    dtype: jnp.dtype,
    num_full_adapters: int = 0,
    *,
    share: float = LORA_SHARE,
    rank: int | None = None,
    step: int = 0,
) -> tuple[SlotAllocator, SlotsSpec]:
    """Return slots for the modules of `local_catalogue`, all or some of the catalogue's.

    `num_full_adapters` more slots have room for adapters of max_lora_rank on every module of
    the catalogue. All others take at most `share` of what is free, on a device with a limit; they
    are counted as adapters of `rank` there, and one of max_lora_rank always fits. `step` bytes are
    a step's own arrays'.
    """
    one, free = _one_adapter_bytes(config, local_catalogue, dtype), free_device_bytes(config, step)
    rank = None if free is None or config.lora_memory_bytes is not None else rank
    usual = _one_adapter_bytes(config, local_catalogue, dtype, rank)
    budget = adapter_bytes(config, one, free, share, usual)
    itemsize = lora_dtype(config, dtype).itemsize
    spec = _size_slots(config, local_catalogue, itemsize, budget, rank or config.max_lora_rank)
    _warn_if_short(config, local_catalogue, spec, itemsize, budget, rank)
    if usual < one:
        logger.info(
            "LoRA slots have rows for adapters of rank %d, the largest that was given. "
            "--lora-memory-bytes %d has room for %d of --max-lora-rank %d.",
            rank,
            config.max_loras * one,
            config.max_loras,
            config.max_lora_rank,
        )
    if num_full_adapters:
        more = rows_per_adapter(catalogue, config.max_lora_rank)
        rows = {
            width: spec.rows.get(width, 0) + num_full_adapters * count
            for width, count in more.items()
        }
        spec = SlotsSpec(spec.num_slots + num_full_adapters, rows)
        budget = rows_nbytes(rows, itemsize)
    logger.info("LoRA slots: %d, rank rows of up to %.1f MB.", spec.num_slots, budget / 1e6)
    return SlotAllocator(catalogue, spec.num_slots, spec.rows, itemsize), spec


def _size_slots(
    config: EngineConfig, catalogue: LoraCatalogue, itemsize: int, budget: int, rank: int
) -> SlotsSpec:
    """Return pools for adapters of `rank`, in which one of max_lora_rank has room too."""
    spec = size_slots(catalogue, config.max_loras, rank, itemsize, budget)
    largest = rows_per_adapter(catalogue, config.max_lora_rank)
    if all(spec.rows[width] >= count for width, count in largest.items()):
        return spec
    return size_slots(catalogue, config.max_loras, config.max_lora_rank, itemsize, budget)


def _warn_if_short(
    config: EngineConfig,
    catalogue: LoraCatalogue,
    spec: SlotsSpec,
    itemsize: int,
    budget: int,
    rank: int | None,
) -> None:
    """Log where LoRA memory holds fewer whole adapters than max_loras."""
    one = rows_per_adapter(catalogue, rank or config.max_lora_rank)
    one_bytes, held = rows_nbytes(one, itemsize), whole_adapters(one, spec.rows)
    needed = config.max_loras * one_bytes
    if not one_bytes:  # all modules are elsewhere
        return
    sizes = one_bytes, "--lora-memory-bytes", budget, needed
    if line := shortage_line(config, held, *sizes, rank=rank):
        logger.warning(line)
