"""One pool of pages for KV, rank rows and ESFT experts: its sizes, and its parts of an engine."""

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slots import SlotsSpec, rows_per_adapter, saved_rows
from lora_jax.adapters.vocabulary import brings_tokens
from lora_jax.config import ModelConfig
from lora_jax.kv_cache import KVShape
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.models.expert_tensors import ExpertTensors
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.ops.cpu import build
from lora_jax.pooled import PooledPages, PooledRows
from lora_jax.rank_rows import rows_nbytes
from serving.api.config import EngineConfig
from serving.engine.memory.sizing import CacheSize, longest_wanted, shortage_line
from serving.engine.memory.storage import kv_dtype, lora_dtype
from serving.loading.esft_parts import EsftParts
from serving.loading.page_room import PageRoom
from serving.loading.pooled_allocator import PooledSlotAllocator
from serving.loading.pooled_experts import PooledExpertAllocator
from serving.scheduling.pages.exchange import PageExchange
from serving.scheduling.pages.extents import PageExtents
from serving.scheduling.pages.prefix_cache import PageCache

logger = logging.getLogger(__name__)

LARGEST_PAGE, LARGEST_EXTENT = 2 << 20, 64 << 20  # bytes
_EXTENTS = 128  # in all of the pool, unless they were larger than the largest
_PAGES = 1024  # at least, of a pool whose memory has smaller ones
KERNEL_HEADS = (64, 128, 256)  # dimensions of heads that a CUDA kernel writes in place
KERNEL_GROUP = 32  # rank rows that a CUDA kernel may read at once, whatever the rank


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Pages of a pool, and what of them each side may have; KV pages are of page_size tokens."""

    page_bytes: int
    pages: int
    extent: int  # KV pages that come and go together
    extent_pages: int  # of the pool
    kv_pages: int  # that could ever be; a multiple of `extent`
    least_kv: int  # that always have memory
    max_model_len: int


@dataclasses.dataclass(frozen=True, eq=False)
class PagePoolParts:
    """The pool of an engine, and the parts that share it."""

    sizes: PoolSizes
    room: PageRoom
    exchange: PageExchange
    allocator: PooledSlotAllocator
    spec: SlotsSpec
    size: CacheSize

    def extents(self, cache: PageCache) -> PageExtents:
        """Return the KV side of the exchange over a cache whose pages are all absent."""
        sizes = self.sizes
        options = {
            "extent": sizes.extent,
            "extent_pages": sizes.extent_pages,
            "least": sizes.least_kv,
        }
        extents = PageExtents(cache, self.exchange, self.room, **options)
        self.room.mapped_pages = lambda: extents.mapped
        return extents


def check_platform(config: EngineConfig) -> None:
    """Raise ValueError for a page pool on a device where nothing writes KV in place."""
    if config.page_pool_bytes is None:
        return
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        raise ValueError(
            f"page_pool_bytes is for CPUs and NVIDIA GPUs; on {platform} nothing writes KV in "
            "place. Set kv_cache_memory_bytes and lora_memory_bytes."
        )
    if platform == "cpu" and not build.available():
        raise ValueError(
            "page_pool_bytes needs the C++ kernels, which write KV in place: install g++ or "
            "clang++, or leave it out."
        )


def check_kernels(
    config: EngineConfig, model_config: ModelConfig, catalogue: LoraCatalogue, dtype: jnp.dtype
) -> None:
    """Raise ValueError for what no GPU kernel writes or reads in a pool."""
    brings = brings_tokens(catalogue) or catalogue.most_saved > 0
    refused = {
        f"dtype {dtype.name}, but bfloat16": dtype != jnp.bfloat16,
        f"kv_cache_dtype {config.kv_cache_dtype}": kv_dtype(config, dtype) != dtype,
        "latent attention": model_config.mla is not None,
        f"heads of {model_config.head_dim}, but {KERNEL_HEADS}": (
            model_config.head_dim not in KERNEL_HEADS
        ),
        "adapters that bring rows of the vocabulary": brings,
    }
    if reasons := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"page_pool_bytes on a GPU does not go with {'; '.join(reasons)}. Set "
            "kv_cache_memory_bytes and lora_memory_bytes in its place."
        )


def check_free(memory: AbstractVirtualMemory, num_bytes: int) -> None:
    """Raise ValueError where the device has less than so many bytes outside of jax's own."""
    free = memory.usage().device_free
    if free is not None and free < num_bytes:
        raise ValueError(
            f"page_pool_bytes takes {num_bytes} bytes outside of jax's own memory; the device has "
            f"{free} left. Lower it, or XLA_CLIENT_MEM_FRACTION."
        )


def make_page_pool(
    config: EngineConfig,
    model: AbstractCausalLM,
    model_config: ModelConfig,
    catalogue: LoraCatalogue,
    dtype: jnp.dtype,
    esft: EsftParts | None,
) -> PagePoolParts | None:
    """Return the pool that the config asks for, with addresses for all that could lie in it.

    Where there is room for ESFT adapters it is that of the experts, and the base's come on top.

    Raises ValueError when it has no room for the longest sequence and an adapter of max_lora_rank.
    """
    if config.page_pool_bytes is None:
        return None
    memory, on_gpu = for_platform(jax.default_backend()), jax.default_backend() != "cpu"
    if on_gpu:
        check_kernels(config, model_config, catalogue, dtype)
    tensors = None if esft is None else esft.room.tensors
    assert tensors is None or isinstance(tensors, ExpertTensors), "a page pool has one device"
    shape, of_rows = model.kv_shape(model_config), lora_dtype(config, dtype)
    one = largest_adapter(catalogue, config.max_lora_rank)
    sides = kv_sides(shape, config.block_size, kv_dtype(config, dtype))
    page = page_size(config, memory.granularity) if tensors is None else tensors.pool.page_bytes
    row = {width: rows_nbytes({width: 1}, of_rows.itemsize) for width in one}
    overrun = max(KERNEL_GROUP, config.max_lora_rank) if on_gpu else 0
    of_kernels = sum(-(-2 * overrun * num_bytes // page) for num_bytes in row.values())
    adapter = rows_by_bytes({w: n + overrun for w, n in one.items()}, of_rows.itemsize)
    sizes = pool_sizes(config, sides, adapter, model_config.max_positions, page, of_kernels)
    if tensors is None:
        num_bytes = (sizes.pages + of_kernels) * page
        check_free(memory, num_bytes)
        pool, kept = PagePool(memory, page_bytes=page, budget_bytes=num_bytes), of_kernels
    else:
        pool, kept = tensors.pool, tensors.base_pages + of_kernels
    most = sizes.pages - -(-sizes.least_kv // sizes.extent) * sizes.extent_pages
    _warn_if_short(config, adapter, most, page)
    rows = {w: min(config.max_loras * count, most * page // row[w]) for w, count in one.items()}
    kv = shape, sizes.kv_pages, config.block_size, kv_dtype(config, dtype)
    pages = PooledPages(pool, *kv, cleared=on_gpu)
    room = PageRoom(pool, pages, PooledRows(pool, rows, of_rows, overrun=overrun))
    exchange = PageExchange(pool, kept=kept)
    sizes_of_rows = config.max_loras, rows, of_rows.itemsize
    allocator = PooledSlotAllocator(catalogue, *sizes_of_rows, room, exchange, most)
    if esft is not None:
        assert isinstance(esft.room.allocator, PooledExpertAllocator), "as esft_parts makes it"
        esft.room.allocator.join(exchange, most)
    logger.info(
        "Page pool: %d pages of %d kB for KV and adapters; KV from %d to %d pages of %d tokens, "
        "in extents of %d.",
        sizes.pages,
        sizes.page_bytes >> 10,
        sizes.least_kv,
        sizes.kv_pages,
        config.block_size,
        sizes.extent,
    )
    size = CacheSize(sizes.kv_pages, config.block_size, sizes.max_model_len)
    return PagePoolParts(sizes, room, exchange, allocator, SlotsSpec(config.max_loras, rows), size)


def largest_adapter(catalogue: LoraCatalogue, rank: int) -> dict[int, int]:
    """Return the most rank rows of each width that one adapter takes, with whole embeddings."""
    rows, saved = rows_per_adapter(catalogue, rank), saved_rows(catalogue)
    return {width: count + saved.get(width, 0) for width, count in rows.items()}


def _warn_if_short(
    config: EngineConfig, adapter_sides: tuple[int, ...], most_pages: int, page: int
) -> None:
    """Log where all pages that may be adapters' hold fewer whole adapters than max_loras."""
    assert config.page_pool_bytes is not None
    of_one = max(1, most_adapter_pages(adapter_sides, page))
    held = most_pages // of_one
    needed = config.page_pool_bytes + (config.max_loras - held) * of_one * page
    sizes = of_one * page, "--page-pool-bytes", most_pages * page, needed
    if line := shortage_line(config, held, *sizes):
        logger.warning(line)


def most_adapter_pages(adapter_sides: tuple[int, ...], page: int) -> int:
    """Return the most pages that rows of so many bytes by width take, wherever they lie."""
    return sum(-(-side // page) + 1 for side in adapter_sides)


def page_size(config: EngineConfig, granularity: int) -> int:
    """Return the bytes of a page: the memory's granularity, doubled while there are many."""
    assert config.page_pool_bytes is not None
    page = granularity
    while 2 * page <= min(LARGEST_PAGE, config.page_pool_bytes // _PAGES):
        page *= 2
    return page


def kv_sides(shape: KVShape, page_size: int, dtype: jnp.dtype) -> tuple[int, ...]:
    """Return the bytes of K and of V of a KV page of all layers; MLA has no V."""
    sides = (
        dataclasses.replace(shape, v_dim=0),
        dataclasses.replace(shape, k_dim=0),
    )
    page_bytes = (side.bytes_per_token(dtype) * page_size for side in sides)
    return tuple(num_bytes for num_bytes in page_bytes if num_bytes)


def rows_by_bytes(rows: dict[int, int], itemsize: int) -> tuple[int, ...]:
    """Return the bytes of an adapter's rows of each width."""
    return tuple(rows_nbytes({width: count}, itemsize) for width, count in rows.items() if count)


def pool_sizes(
    config: EngineConfig,
    kv_sides: tuple[int, ...],
    adapter_sides: tuple[int, ...],
    model_positions: int,
    page: int,
    kept: int = 0,
) -> PoolSizes:
    """Return the sizes of a pool of page_pool_bytes in pages of so many bytes.

    `kv_sides` are the bytes of K and V of a KV page, `adapter_sides` those of an adapter's rows by
    width, `kept` the pages that are neither's. KV never takes what one adapter needs, nor adapters
    what the longest sequence does. A max_model_len that was not asked for is at most half of the
    pool. Raises ValueError.
    """
    budget = config.page_pool_bytes
    assert budget is not None
    pages = budget // page - kept
    extent = math.lcm(*(page // math.gcd(page, side) for side in kv_sides))
    extent *= max(1, min(LARGEST_EXTENT, budget // _EXTENTS) // (extent * sum(kv_sides)))
    extent_pages = sum(extent * side for side in kv_sides) // page
    adapter = most_adapter_pages(adapter_sides, page)
    wanted = longest_wanted(config, model_positions)
    most = max(0, pages - adapter) // extent_pages * extent  # KV pages
    longest = min(wanted, (most if config.max_model_len else most // 2) * config.block_size)
    if longest < (config.max_model_len or 1):
        need = -(-max(1, -(-wanted // config.block_size)) // extent) * extent_pages + adapter
        raise ValueError(
            f"page_pool_bytes {budget} has room for {pages} pages of {page} bytes. A sequence of "
            f"{wanted} tokens and an adapter of rank {config.max_lora_rank} take {need} "
            "pages: raise it, or lower max_model_len or max_lora_rank."
        )
    least = -(-longest // config.block_size)
    useful = config.step_seqs * least
    kv_pages = min(most, -(-useful // extent) * extent)
    return PoolSizes(page, pages, extent, extent_pages, kv_pages, least, longest)
