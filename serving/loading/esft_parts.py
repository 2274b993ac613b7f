"""ESFT parts of an engine: expert tensors, their allocator, and the tables."""

import dataclasses
import logging
import time

import jax
import numpy as np

from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertSizes
from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.config import ModelConfig
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.virtual import AbstractVirtualMemory, OutOfPages
from lora_jax.models.expert_tensors import ExpertTensors, expert_blocks, has_quantised
from lora_jax.models.split_experts import SplitExpertTensors
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.loading.esft_checks import QUANTISED, why_no_esft
from serving.loading.expert_loading import AnyTensors, ExpertRoom, identity_tables
from serving.loading.pooled_experts import PooledExpertAllocator

logger = logging.getLogger(__name__)

DEFAULT_ADAPTERS = 16
BY_DEFAULT = ("cpu", "gpu")  # where steps over such tensors have run
KEPT_FREE = 2 << 30  # bytes of a device that CUDA graphs and libraries take beside all arrays


@dataclasses.dataclass(frozen=True, eq=False)
class EsftParts:
    """The room for ESFT adapters, and the reroute tables of an engine that has none yet."""

    room: ExpertRoom
    tables: np.ndarray


def make_esft(
    config: EngineConfig,
    model: AbstractCausalLM,
    model_config: ModelConfig,
    split: Split | None = None,
) -> EsftParts | None:
    """Move the model's experts into virtual tensors; None where ESFT is off.

    It is off with max_esft_adapters 0, and by default for models that cannot, on devices where no
    step over such tensors has run, and where jax has left too little memory: they lie outside of
    what it takes at its start. Raises ValueError when it was asked for and cannot be, or when there
    is no memory for the experts. With a split each device has those of its own experts, and bytes
    are those of one device.
    """
    memories = _memories_for(config, model, model_config)
    if memories is None:
        return None
    start, moe = time.monotonic(), model_config.experts
    num_slots = config.max_esft_adapters or DEFAULT_ADAPTERS
    most = min(config.max_esft_experts, moe.num_experts)
    is_pooled = config.page_pool_bytes is not None
    budget = config.page_pool_bytes if is_pooled else config.esft_memory_bytes
    left = _bytes_left(memories, model)
    if budget is None and left is not None:
        budget = max(0, left)
    tensors = _move(model, memories, split, num_slots * most, budget)
    of_experts = None if is_pooled else budget
    sizes = ExpertSizes(tensors.layers, moe.num_experts, most, tensors.expert_bytes, of_experts)
    pages = tensors.pages()
    logger.info(
        "ESFT adapters: %d, of up to %d experts in each of %d layers; base experts in %d pages of "
        "%d kB, moved in %.1f s.",
        num_slots,
        most,
        len(tensors.layers),
        pages.base_bytes // pages.page_bytes,
        pages.page_bytes >> 10,
        time.monotonic() - start,
    )
    tables = identity_tables(len(tensors.layers), num_slots, moe.num_experts)
    if is_pooled and isinstance(tensors, ExpertTensors):
        tensors.is_shared = True
        allocator = PooledExpertAllocator(num_slots, sizes, tensors)
    else:
        allocator = ExpertAllocator(num_slots, sizes)
    return EsftParts(ExpertRoom(tensors, allocator), tables)


def _memories_for(
    config: EngineConfig, model: AbstractCausalLM, model_config: ModelConfig
) -> list[AbstractVirtualMemory] | None:
    """Return the devices' memories, or None where ESFT is off; ValueError: asked for in vain."""
    wanted = config.max_esft_adapters
    if wanted == 0:
        return None
    platform = jax.default_backend()
    why = why_no_esft(model_config)
    if why:
        pass
    elif has_quantised(expert_blocks(model).values()):
        why = QUANTISED
    elif wanted is None and platform not in BY_DEFAULT:
        why = f"on {platform} they must be asked for"
    else:
        try:
            devices = range(config.tensor_parallel_size)
            memories = [for_platform(platform, device) for device in devices]
            left = _bytes_left(memories, model)
            if wanted is not None or left is None or left >= 0:
                return memories
            why = (
                f"the device lacks {-left} bytes outside of jax's own memory for the experts "
                "(XLA_CLIENT_MEM_FRACTION)"
            )
        except NotImplementedError as error:
            why = str(error)
    if wanted is not None:
        raise ValueError(f"max_esft_adapters is {wanted}, but {why}.")
    logger.info("ESFT adapters: none, %s.", why)
    return None


def _bytes_left(memories: list[AbstractVirtualMemory], model: AbstractCausalLM) -> int | None:
    """Return what the fullest device has left for adapters, below 0 if too little for its experts.

    None where nobody counts, as on a host.
    """
    free_sizes = [free for memory in memories if (free := memory.usage().device_free) is not None]
    if not free_sizes:
        return None
    experts = expert_blocks(model).values()
    needed = sum(getattr(e, name)[...].nbytes for e in experts for name in PROJECTIONS)
    return min(free_sizes) - needed // len(memories) - KEPT_FREE


def _move(
    model: AbstractCausalLM,
    memories: list[AbstractVirtualMemory],
    split: Split | None,
    extra: int,
    extra_bytes: int | None,
) -> AnyTensors:
    """Return the model's experts in virtual tensors; ValueError where there is no memory."""
    sizes = {"extra": extra, "extra_bytes": extra_bytes}
    try:
        if split is not None:
            return SplitExpertTensors(model, memories, split, **sizes)
        return ExpertTensors(model, memories[0], **sizes)
    except OutOfPages as error:
        raise ValueError(
            f"no memory for the experts in pages of their own: {error}. max_esft_adapters 0 "
            "leaves them where they are."
        ) from error
