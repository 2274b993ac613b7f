"""Checks of an engine before its weights are read, which may take minutes; what they find."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from lora_jax.config import ModelConfig
from lora_jax.memory.arena import ImportedArena
from lora_jax.models.loader import read_config
from lora_jax.ops.cpu import build as cpu_kernels
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.api.device_sizes import for_device
from serving.api.generation_config import GenerationConfig, read_generation_config
from serving.api.load_format import WeightSource
from serving.engine.memory.jax_share import take_share
from serving.engine.memory.memory_budget import bytes_limit
from serving.engine.memory.page_pool import check_platform
from serving.engine.parts.devices import split_of
from serving.engine.parts.early_checks import check_adapters, check_plain, check_primary
from serving.engine.parts.early_sizes import check_sizes
from serving.engine.parts.image_parts import check_image_files
from serving.engine.parts.over_hosts import for_hosts
from serving.engine.parts.pairs import Beside, check_pairs
from serving.engine.parts.shared_backbone import check_backbone, source_of
from serving.loading.esft_checks import check_esft
from serving.lora_server.instance import check_devices
from serving.lora_server.sides import RemoteAccess
from serving.runtime.gang import Gang
from serving.runtime.program_cache import keep_programs
from serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class EngineStart:
    """The checked config and what small files say."""

    config: EngineConfig  # with what the device and the other processes make of it
    source: WeightSource
    tokenizer: Tokenizer
    generation: GenerationConfig
    split: Split | None


def prepare(
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    access: RemoteAccess | None,
    backbone: ImportedArena | None,
    gang: Gang | None,
) -> EngineStart:
    """Check the config and the small files of model and adapters, and set up jax.

    Raises ValueError for what cannot be served.
    """
    check_devices(access, config)
    has_tenants = access is not None and access.holds_all
    if backbone is not None:
        config = check_backbone(config, access is not None and not has_tenants)
    described = read_config(Path(config.model))
    beside = Beside(access is not None, has_tenants, gang is not None, backbone is not None)
    check_pairs(config, described, beside)
    source = source_of(config, backbone, None if access is None else access.read_adapter)
    made_up = described.vocab_size if source.made_up else None
    tokenizer = Tokenizer(config.model, chat_template=config.chat_template, made_up=made_up)
    check_image_files(config, described, tokenizer)
    if access is None or access.read_adapter is None:
        check_adapters(config, adapters)
        check_plain(config, adapters, has_server=access is not None)
        check_esft(config, described, adapters)
        check_primary(config, adapters)
    generation = read_generation_config(
        config.model, config.generation_config, config.override_generation_config
    )
    alone = access is None and backbone is None
    take_share(config, described, alone=alone and gang is None)
    check_platform(config)
    config = for_hosts(config, gang)
    keep_programs()
    split = split_of(config, gang)
    config = _for_first_device(config, described, split, alone=alone)
    reads = access is None or access.read_adapter is None
    check_sizes(config, described, adapters, split, alone=access is None, reads=reads)
    return EngineStart(config, source, tokenizer, generation, split)


def _for_first_device(
    config: EngineConfig, described: ModelConfig, split: Split | None, *, alone: bool
) -> EngineConfig:
    """Return the config with the sizes of this process's kind of device."""
    device = jax.devices()[0]
    logger.info(
        "jax %s on %s (%d devices).", jax.__version__, device.device_kind, len(jax.devices())
    )
    on_cpu = device.platform == "cpu"
    return for_device(
        config,
        on_cpu=on_cpu,
        portable=on_cpu and split is None and not cpu_kernels.available(),
        device_bytes=bytes_limit(),
        alone=alone,
        has_experts=described.moe is not None,
    )
