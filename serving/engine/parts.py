"""Builds the parts of an engine from its config, with a log line for each."""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.adapters.registry import AdapterRegistry
from lora_jax.adapters.slots import SlotsSpec, init_slots
from lora_jax.adapters.task_head import SCORE
from lora_jax.config import ModelConfig
from lora_jax.memory.arena import ImportedArena
from lora_jax.models.weight_sizes import weight_sizes
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.output_norms import OutputNorms
from lora_jax.ops import dispatch
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.api.generation_config import read_generation_config
from serving.api.load_format import WeightSource
from serving.engine.brought_parts import take_brought
from serving.engine.devices import held_locally, local_widths, log_devices, split_of
from serving.engine.draft_metrics import check_speculation, make_speculation
from serving.engine.head_parts import head_labels, take_heads
from serving.engine.image_parts import ImageParts, check_pairs, make_encoder, make_front, take_tower
from serving.engine.loop import EngineLoop, LoopParts
from serving.engine.memory_budget import make_allocator, size_kv_cache
from serving.engine.merging import (
    AUTO,
    check_merging,
    make_merged,
    make_modes,
    merge_primary,
    watch_merging,
)
from serving.engine.metrics import EngineMetrics, make_metrics
from serving.engine.model_info import ModelInfo, catalogue_of, log_quantised, model_info
from serving.engine.registries import load_adapters, make_registry
from serving.engine.shared_backbone import check_backbone, source_of
from serving.engine.sizing import CacheSize
from serving.engine.stats import EngineStats
from serving.engine.storage import check_storage, host_form, kv_dtype, lora_dtype
from serving.engine.version_metrics import ShareCollector
from serving.images.front import ImageFront
from serving.loading.compositions import Compositions
from serving.loading.esft_parts import EsftParts, make_esft
from serving.loading.residencies import Residencies, make_residencies
from serving.lora_server.instance import InstanceSide, ServerAccess, connect
from serving.runtime.compile_counter import CompileCounter
from serving.runtime.device_copier import device_copier
from serving.runtime.program_cache import keep_programs
from serving.runtime.rollouts import Rollouts
from serving.scheduling.scheduler import Scheduler, SchedulerLimits
from serving.steps.merged_weights import MergedWeights
from serving.steps.model_runner import ModelRunner
from serving.steps.step import StepSizes
from serving.text.structured.grammars import Grammars
from serving.text.structured.vocabulary import vocabulary_of
from serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class EngineParts:
    """Parts of an engine."""

    tokenizer: Tokenizer
    registry: AdapterRegistry
    rollouts: Rollouts
    compositions: Compositions
    residencies: Residencies
    metrics: EngineMetrics
    compilations: CompileCounter
    loop: EngineLoop
    model_info: ModelInfo
    images: ImageFront | None
    grammars: Grammars
    primary: str | None = None  # digest of the adapter that is served alone


def build_parts(
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    access: ServerAccess | None = None,
    backbone: ImportedArena | None = None,
) -> EngineParts:
    """Load the model and the named adapters, compile, and return the parts; nothing runs yet.

    With `access` the experts' part of LoRA adapters is on a LoRA Server, with `backbone` the
    weights are another process's. Raises ValueError for a
    model or an adapter that cannot be served, and ConnectionError when the server cannot be
    reached or does not fit.
    """
    if access is not None and config.tensor_parallel_size > 1:
        raise ValueError(
            "A LoRA Server serves instances of one device each: set tensor_parallel_size to 1, "
            f"not {config.tensor_parallel_size}, or keep the adapters on the instances."
        )
    check_speculation(config, has_server=access is not None)
    if backbone is not None:
        config = check_backbone(config, access is not None)
    check_storage(config, has_server=access is not None)
    generation = read_generation_config(
        config.model, config.generation_config, config.override_generation_config
    )
    keep_programs()
    split = split_of(config)
    device = jax.devices()[0]
    logger.info(
        "jax %s on %s (%d devices).", jax.__version__, device.device_kind, len(jax.devices())
    )
    source = source_of(config, backbone)
    model, model_config, dtype = _load_model(config, source, split)
    made_up = model_config.vocab_size if source.made_up else None
    tokenizer = Tokenizer(config.model, chat_template=config.chat_template, made_up=made_up)
    images = take_tower(config, model, model_config, dtype)
    config = check_pairs(model_config, access is not None, config)
    check_merging(config, model_config, has_server=access is not None)
    weights = weight_sizes(model)
    with ExitStack() as undo:
        remote = None if access is None else connect(access, config, dtype.name)
        if remote is not None:
            undo.callback(remote.close)
        esft = make_esft(config, model, model_config, split)
        if esft is not None:
            undo.callback(esft.room.close)
        # KV pages may lie where the experts were.
        labels = head_labels(config, adapters, remote is not None)
        modules, hidden = catalogue_of(model, model_config), model_config.hidden_size
        catalogue = take_heads(model, modules, hidden, labels)
        catalogue, norms = take_brought(
            model, catalogue, config, adapters, has_server=remote is not None
        )
        merged = make_merged(config, model)  # which names modules as the slots do
        widths = local_widths(split)
        local_modules, num_full_adapters = held_locally(catalogue, remote, widths)
        cache_bytes = 0 if images is None else images.cache_bytes
        devices = config.tensor_parallel_size
        room = (model_config, local_modules, dtype, num_full_adapters, cache_bytes, devices)
        size = size_kv_cache(config, model, *room)
        info = model_info(config, weights, model_config, size, dtype, tokenizer, generation)
        base = _Base(
            model,
            model_config,
            source,
            catalogue,
            dtype,
            size,
            esft,
            remote,
            split,
            widths,
            images,
            merged,
            norms,
        )
        parts = _build(config, adapters, base, tokenizer, info)
        undo.pop_all()
        return parts


@dataclasses.dataclass(frozen=True, eq=False)
class _Base:
    """A model that is loaded, and what was set up around it."""

    model: AbstractCausalLM
    config: ModelConfig
    source: WeightSource
    catalogue: LoraCatalogue  # all modules that adapters may be on, and their heads
    dtype: jnp.dtype
    size: CacheSize
    esft: EsftParts | None
    remote: InstanceSide | None
    split: Split | None
    widths: LocalWidths | None  # of the split
    images: ImageParts | None
    merged: MergedWeights | None
    norms: OutputNorms | None  # where adapters may scale outputs


def _build(
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    base: _Base,
    tokenizer: Tokenizer,
    info: ModelInfo,
) -> EngineParts:
    """Return the parts around a model that is loaded."""
    held = held_locally(base.catalogue, base.remote, base.widths)
    local_modules, num_full_adapters = held
    allocator, spec = make_allocator(
        config, base.catalogue, local_modules, base.dtype, num_full_adapters
    )
    metrics = make_metrics(config, info)
    residencies = make_residencies(
        allocator,
        base.esft,
        base.remote,
        copier=None if base.split is not None else device_copier(),
        host_form=host_form(config, base.catalogue, base.widths, base.norms),
        on_loaded=metrics.adapter_loaded_on_device,
    )
    registry, compositions = make_registry(config, base, residencies, metrics.tiers.read)
    load_adapters(registry, adapters)
    primary = merge_primary(config, base.model, registry)
    end_ids = info.end_token_ids
    runner = _make_runner(config, base, spec, end_ids, allocator.bringing)
    watch_merging(metrics.registry, base.merged)
    compilations = CompileCounter()
    rollouts = Rollouts(registry)
    registry.set_kept(rollouts.kept)
    metrics.registry.register(ShareCollector(rollouts.states))
    num_rows = 0 if base.images is None else base.images.num_rows
    modes = make_modes(config, base.merged, residencies)
    how = {"modes": modes, "speculation": make_speculation(config, metrics)}
    scheduler = _make_scheduler(config, base.size, residencies, end_ids, num_rows, **how)
    grammars = _make_grammars(config, tokenizer, info)
    loop = EngineLoop(
        LoopParts(
            runner,
            scheduler,
            registry,
            residencies,
            metrics,
            compilations,
            grammars,
            config.adapter_load_chunks_per_step,
            rollouts.finished,
            compositions,
        )
    )
    residencies.call_on_news(loop.wake)
    metrics.set_source(lambda: engine_stats(loop, registry, residencies, metrics, compilations))
    front = None
    if base.images is not None:
        front = make_front(config, base.images, base.config, tokenizer, base.size.max_model_len)
    told = metrics, compilations, loop, info, front, grammars
    return EngineParts(tokenizer, registry, rollouts, compositions, residencies, *told, primary)


def engine_stats(
    loop: EngineLoop,
    registry: AdapterRegistry,
    residencies: Residencies,
    metrics: EngineMetrics,
    compilations: CompileCounter,
) -> EngineStats:
    """Return where the engine stands; any thread may ask."""
    scheduler, on_device = loop.scheduler_stats(), residencies.snapshot
    entries = registry.entries()
    sizes = {entry.digest: (entry.kind, entry.report.weight_bytes) for entry in entries}
    by_kind: dict[str, int] = {}
    for kind, size in sizes.values():
        by_kind[kind] = by_kind.get(kind, 0) + size
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting_capacity + scheduler.num_waiting_adapter,
        waiting_for_adapter=scheduler.num_waiting_adapter,
        kv_usage=scheduler.kv_usage,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        preemptions=scheduler.num_preemptions,
        image_stats=scheduler.images,
        prompt_tokens=metrics.prompt_tokens,
        generation_tokens=metrics.generation_tokens,
        adapters_loaded=len(entries),
        adapter_slots_used=on_device.slots_used,
        adapter_slots_total=on_device.slots_total,
        adapter_swaps=on_device.swaps,
        adapter_bytes=by_kind,
        adapter_device_bytes=on_device.bytes_used,
        expert_page_bytes=on_device.expert_page_bytes,
        resident_adapters=tuple(e.name for e in entries if e.digest in on_device.resident),
        waiting_adapters=scheduler.waiting_adapters,
        compilations_after_warmup=compilations.count,
        steps=loop.num_steps,
        implementations=dispatch.table(),
    )


def _load_model(
    config: EngineConfig, source: WeightSource, split: Split | None
) -> tuple[AbstractCausalLM, ModelConfig, jnp.dtype]:
    start = time.monotonic()
    wanted = None if config.dtype == "auto" else jnp.dtype(config.dtype)
    model, model_config = source.load_model(config.model, dtype=wanted, split=split)
    sizes = weight_sizes(model)
    dtype = jax.tree.leaves(nnx.state(model.embed))[0].dtype
    logger.info(
        "Model %s: %s, %.1f M parameters, %.1f MB, %s, loaded in %.1f s.",
        Path(config.model).name,
        model_config.model_type,
        sizes.parameters / 1e6,
        sizes.num_bytes / 1e6,
        dtype.name,
        time.monotonic() - start,
    )
    log_quantised(model_config, sizes)
    log_devices(split)
    return model, model_config, dtype


def _make_grammars(config: EngineConfig, tokenizer: Tokenizer, info: ModelInfo) -> Grammars:
    if not config.structured_outputs:
        off = "structured_outputs are off: start without --no-structured-outputs."
        return Grammars(None, why_none=off)
    return Grammars(vocabulary_of(tokenizer, info.vocab_size, info.end_token_ids))


def _make_runner(
    config: EngineConfig,
    base: _Base,
    spec: SlotsSpec,
    end_ids: tuple[int, ...],
    bringing: Set[int],
) -> ModelRunner:
    start = time.monotonic()
    link = None if base.remote is None else base.remote.link
    names, longest = base.catalogue.module_names, base.size.max_model_len
    encoder = base.images and make_encoder(config, base.images, base.config, names, longest)
    runner = ModelRunner(
        base.model,
        base.model.kv_shape(base.config),
        _step_sizes(config, base),
        max_tokens=config.max_num_batched_tokens,
        vocab_size=base.config.vocab_size,
        dtype=kv_dtype(config, base.dtype),
        end_ids=end_ids,
        slots=init_slots(base.catalogue, spec, lora_dtype(config, base.dtype), base.split),
        reroute_tables=None if base.esft is None else base.esft.tables,
        link=link,
        encoder=encoder,
        # On a CPU the adapters' kernels return at once where no row has an adapter, but exchanges
        # that nobody needs take a third of a small model's step.
        specialize_lora=config.specialize_lora
        and (jax.default_backend() != "cpu" or link is not None),
        structured_outputs=config.structured_outputs,
        split=base.split,
        merged=base.merged,
        mixture=config.lora_merge == AUTO,
        bringing=bringing,
    )
    runner.warm_up(progress=True)
    logger.info(
        "Compiled %d programs for steps of up to %s tokens in %.1f s.",
        runner.num_programs,
        ", ".join(map(str, runner.buckets)),
        time.monotonic() - start,
    )
    return runner


def _step_sizes(config: EngineConfig, base: _Base) -> StepSizes:
    size, head = base.size, base.catalogue.modules.get(SCORE)
    return StepSizes(
        max_seqs=config.max_num_seqs,
        max_len=size.max_model_len,
        page_size=size.page_size,
        num_pages=size.num_pages,
        max_logit_rows=config.max_logit_rows,
        max_rank=config.max_lora_rank,
        max_drafts=config.max_drafts,
        head_width=0 if head is None else head.d_out,
    )


def _make_scheduler(
    config: EngineConfig,
    size: CacheSize,
    residencies: Residencies,
    end_ids: tuple[int, ...],
    num_encoder_rows: int,
    **how: Any,
) -> Scheduler:
    limits = SchedulerLimits(
        num_pages=size.num_pages,
        page_size=size.page_size,
        max_model_len=size.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logit_rows=config.max_logit_rows,
        max_queue=config.max_queue,
        adapter_wait_s=config.adapter_wait_s,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        num_encoder_rows=num_encoder_rows,
    )
    fixed = {"eos_token_ids": end_ids, "seed": config.seed}
    return Scheduler(limits, adapters=residencies, **fixed, **how)
