"""The share of a GPU that JAX takes at its start, where the environment does not say it.

JAX itself takes three quarters. What lies outside of that are ESFT experts, a page pool, messages
to a LoRA Server, CUDA graphs and libraries; an engine with none of the first three would leave a
fifth of the GPU idle.
"""

import logging
import os

import jax
from jax._src import xla_bridge  # nothing public says whether jax is at work

from lora_jax.config import ModelConfig
from lora_jax.memory.platforms import for_platform
from serving.api.config import EngineConfig

logger = logging.getLogger(__name__)

USUAL, LARGE = 0.75, 0.9  # of a device
_NAME = "XLA_CLIENT_MEM_FRACTION"
_SAID = (_NAME, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
_PROJECTIONS, _ITEM_BYTES = 3, 2


def take_share(config: EngineConfig, model: ModelConfig, *, alone: bool) -> bool:
    """Let JAX take `LARGE` of each GPU, where nothing of this engine lies outside of JAX's memory.

    JAX then knows its devices; before, nothing may have asked for them. Returns False where JAX
    takes what it usually does.
    """
    said = any(name in os.environ for name in _SAID)
    if _is_outside(config, alone) or said or xla_bridge.backends_are_initialized():
        return False
    try:
        usage = for_platform("gpu").usage()
    except NotImplementedError:
        return False
    free = usage.device_free or 0
    device = free + (usage.device_used or 0)
    if free < LARGE * device or _may_have_esft(
        config, model, device
    ):  # others use it, or ESFT will
        return False
    os.environ[_NAME] = str(LARGE)
    try:
        has_gpu = jax.default_backend() == "gpu"
    finally:
        del os.environ[_NAME]  # not for processes that this one starts
    if has_gpu:
        logger.info("JAX takes %.2f of a GPU's memory (%s).", LARGE, _NAME)
    return has_gpu


def share_of(config: EngineConfig, model: ModelConfig, device_bytes: int) -> float:
    """Return the share that JAX takes of each device of a lone engine, which nobody else uses."""
    outside = _is_outside(config, alone=True) or _may_have_esft(config, model, device_bytes)
    return USUAL if outside else LARGE


def _is_outside(config: EngineConfig, alone: bool) -> bool:
    """Return whether an engine has memory outside of JAX's, beside that of ESFT."""
    return not alone or config.page_pool_bytes is not None or config.tensor_parallel_size > 1


def _may_have_esft(config: EngineConfig, model: ModelConfig, device: int) -> bool:
    """Return whether the base's experts will lie outside of JAX's memory; `device` is in bytes."""
    if model.moe is None or config.max_esft_adapters == 0:
        return False
    return config.max_esft_adapters is not None or expert_bytes(model) < (1 - USUAL) * device


def expert_bytes(model: ModelConfig) -> int:
    """Return the bytes of a model's experts in 16 bits; 0 of a model without."""
    if model.moe is None:
        return 0
    one = _PROJECTIONS * model.hidden_size * model.moe.intermediate_size * _ITEM_BYTES
    return len(model.moe.layers) * model.moe.num_experts * one
