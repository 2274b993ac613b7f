"""Builds the parts of an engine from its config, with a log line for each."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from lora_jax.adapters import vocabulary
from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.host_table import HostTable
from lora_jax.adapters.registry import AdapterRegistry
from lora_jax.memory.arena import ImportedArena
from lora_jax.models.loader import read_config
from lora_jax.ops import dispatch
from lora_jax.ops.cpu import build as cpu_kernels
from serving.api.config import EngineConfig
from serving.api.device_sizes import for_device
from serving.api.generation_config import read_generation_config
from serving.engine.images.front import ImageFront
from serving.engine.loop.loop import EngineLoop
from serving.engine.loop.loop_parts import AbstractTurns, LoopParts
from serving.engine.memory.given_ranks import usual_rank
from serving.engine.memory.jax_share import take_share
from serving.engine.memory.memory_budget import bytes_limit, make_allocator, size_kv_cache
from serving.engine.memory.page_pool import check_platform, make_page_pool
from serving.engine.memory.sizing import lora_share
from serving.engine.memory.storage import host_form
from serving.engine.metrics.draft_metrics import make_speculation
from serving.engine.metrics.metrics import EngineMetrics
from serving.engine.metrics.stats import EngineStats
from serving.engine.metrics.traces import Traces, make_traces
from serving.engine.metrics.version_metrics import ShareCollector
from serving.engine.parts.brought_parts import take_brought
from serving.engine.parts.devices import held_locally, local_widths, split_of
from serving.engine.parts.early_checks import check_adapters, check_plain
from serving.engine.parts.head_parts import take_heads
from serving.engine.parts.image_parts import (
    check_image_files,
    make_front,
    take_tower,
    watch_tower,
)
from serving.engine.parts.loaded_base import LoadedBase, load_model
from serving.engine.parts.merging import (
    make_merged,
    make_modes,
    merge_primary,
    watch_merging,
)
from serving.engine.parts.model_info import ModelInfo, catalogue_of, model_info
from serving.engine.parts.needed_sizes import head_labels
from serving.engine.parts.over_hosts import for_hosts, shared, teller
from serving.engine.parts.pairs import Beside, check_pairs
from serving.engine.parts.registries import load_adapters, make_registry
from serving.engine.parts.shared_backbone import check_backbone, source_of
from serving.engine.parts.step_parts import logit_rows, make_runner, make_scheduler
from serving.loading.compositions import Compositions
from serving.loading.esft_parts import make_esft
from serving.loading.residencies import Residencies, make_residencies
from serving.lora_server.instance import ServerAccess, check_devices
from serving.lora_server.tenant_side import TenantAccess
from serving.runtime.compile_counter import CompileCounter
from serving.runtime.device_copier import engine_copier
from serving.runtime.gang import Gang
from serving.runtime.program_cache import keep_programs
from serving.runtime.rollouts import Rollouts
from serving.steps.device_users import USERS
from serving.text.adapter_tokenizers import AdapterTokenizers
from serving.text.structured.grammars import Grammars
from serving.text.structured.row_masks import THREADS, THREADS_BESIDE_DEVICE
from serving.text.structured.vocabulary import vocabulary_of
from serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class EngineParts:
    """Parts of an engine."""

    config: EngineConfig  # with what the device and the other processes make of it
    tokenizer: Tokenizer
    tokenizers: AdapterTokenizers
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
    gang: Gang | None = None
    # Whether pages are remembered for prefixes, where the config says so; any thread may say it.
    remember_prefixes: Callable[[bool], None] = lambda wanted: None
    primary: str | None = None  # digest of the adapter that is served alone
    leave: Callable[[], None] = lambda: None  # when the engine uses its devices no more

    def close(self) -> None:
        """End the loop, and leave devices and other processes."""
        self.loop.close()
        self.leave()
        if self.gang is not None:
            self.gang.close()
        self.compilations.close()


def build_parts(
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    access: ServerAccess | TenantAccess | None = None,
    backbone: ImportedArena | None = None,
    turns: AbstractTurns | None = None,
    gang: Gang | None = None,
) -> EngineParts:
    """Load the model and the named adapters, compile, and return the parts; nothing runs yet.

    With `access` the experts' part of LoRA adapters is on a LoRA Server, or all of it in tenants'
    processes; with `backbone` the weights are another process's, with `turns` the device is
    others' too, with `gang` the devices are those of several processes, which all build the same.
    Raises ValueError for a model or an adapter that cannot be served, and ConnectionError when the
    server cannot be reached or does not fit.
    """
    check_devices(access, config)
    if backbone is not None:
        config = check_backbone(config, access is not None and not access.holds_all)
    has_tenants = access is not None and access.holds_all
    beside = Beside(access is not None, has_tenants, gang is not None, backbone is not None)
    described = read_config(Path(config.model))
    check_pairs(config, described, beside)
    # What small files say is found out before the weights, which may take minutes, are read.
    source = source_of(config, backbone, None if access is None else access.read_adapter)
    made_up = described.vocab_size if source.made_up else None
    tokenizer = Tokenizer(config.model, chat_template=config.chat_template, made_up=made_up)
    check_image_files(config, described, tokenizer)
    if access is None or access.read_adapter is None:
        check_adapters(config, adapters)
        check_plain(config, adapters, has_server=access is not None)
    alone = access is None and backbone is None
    take_share(config, described, alone=alone and gang is None)
    check_platform(config)
    config = for_hosts(config, gang)
    traces = make_traces(config.otlp_traces_endpoint, config.model_name)
    generation = read_generation_config(
        config.model, config.generation_config, config.override_generation_config
    )
    keep_programs()
    split = split_of(config, gang)
    device = jax.devices()[0]
    logger.info(
        "jax %s on %s (%d devices).", jax.__version__, device.device_kind, len(jax.devices())
    )
    on_cpu = device.platform == "cpu"
    config = for_device(
        config,
        on_cpu=on_cpu,
        portable=on_cpu and split is None and not cpu_kernels.available(),
        device_bytes=bytes_limit(),
        alone=alone,
        has_experts=described.moe is not None,
    )
    with ExitStack() as undo:
        use = undo.enter_context(ExitStack())
        use.enter_context(USERS.use())
        model, model_config, dtype, weights = load_model(config, source, split)
        images = take_tower(config, model, model_config, dtype)
        if traces is not None:
            undo.callback(traces.close)
        remote = None if access is None else access.open(config, dtype.name)
        if remote is not None:
            undo.callback(remote.close)
        esft = make_esft(config, model, model_config, split)
        if esft is not None:
            undo.callback(esft.room.close)
        # KV pages may lie where the experts were.
        labels = shared(gang, head_labels(config, adapters, remote is not None))
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
        pool = make_page_pool(config, model, *room[:3], esft)
        if pool is not None:
            undo.callback(pool.room.close)
        given = {"share": lora_share(config, len(adapters)), "rank": usual_rank(config, adapters)}
        size = pool.size if pool else shared(gang, size_kv_cache(config, model, *room, **given))
        info = model_info(config, weights, model_config, size, dtype, tokenizer, generation)
        base = LoadedBase(
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
            pool,
        )
        parts = _build(config, adapters, given, base, tokenizer, info, traces, turns, gang)
        parts = dataclasses.replace(parts, leave=use.pop_all().close)
        undo.pop_all()
        return parts


def _build(
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    given: Mapping[str, Any],
    base: LoadedBase,
    tokenizer: Tokenizer,
    info: ModelInfo,
    traces: Traces | None,
    turns: AbstractTurns | None,
    gang: Gang | None,
) -> EngineParts:
    """Return the parts around a model that is loaded; `given` is the adapters' share and rank."""
    held = held_locally(base.catalogue, base.remote, base.widths)
    local_modules, num_full_adapters = held
    if base.pool is not None:
        allocator, spec = base.pool.allocator, base.pool.spec
    else:
        how_many = base.dtype, num_full_adapters
        given = {**given, "step": base.size.step_bytes}
        allocator, spec = make_allocator(config, base.catalogue, local_modules, *how_many, **given)
    spec = shared(gang, spec)
    metrics = _make_metrics(config, info)
    copier = None
    if base.split is None:
        copier = engine_copier(is_pooled=base.pool is not None)
    # The host keeps what a device's memory takes; its own copier converts as it copies.
    copied_as = None if copier is None or isinstance(copier, HostCopier) else base.dtype
    # Merges and towers are programs that read slots and are no steps.
    by_host = isinstance(copier, HostCopier) and base.merged is None and base.images is None
    held_as = base.catalogue, base.widths, base.norms
    residencies = make_residencies(
        allocator,
        base.esft,
        base.remote,
        copier=copier,
        host_form=host_form(config, *held_as, copied_as=copied_as),
        on_loaded=metrics.adapter_loaded_on_device,
        tell=teller(gang),
        room=None if base.pool is None else base.pool.room,
        table=HostTable() if by_host else None,
    )
    tokenizers = AdapterTokenizers(tokenizer, info.vocab_size)
    on_read = metrics.tiers.read, tokenizers.fitted
    registry, compositions = make_registry(config, base, residencies, *on_read)
    end_ids = info.end_token_ids
    with ThreadPoolExecutor(2, thread_name_prefix="start") as pool:
        # Two seconds for 152,000 tokens, in which programs are compiled or read by other threads.
        grammars = pool.submit(_make_grammars, config, tokenizer, info)
        loading = pool.submit(load_adapters, registry, adapters)
        if not base.source.is_shared:  # else programs are read, not compiled, while files are
            loading.result()
        primary = merge_primary(config, base.model, registry)
        how = allocator.bringing, gang, copier is not None
        rows = logit_rows(config, shares_device=turns is not None)
        runner = make_runner(config, base, spec, end_ids, *how, num_logit_rows=rows)
        loading.result()
    watch_merging(metrics.registry, base.merged)
    watch_tower(metrics.registry, runner.encoder)
    compilations = CompileCounter()
    rollouts = Rollouts(registry)
    if vocabulary.brings_tokens(base.catalogue):
        wait_s = config.adapter_wait_s
        tokenizers.ask(functools.partial(rollouts.entry_for, wait_s=wait_s, lends=False))
    registry.set_kept(rollouts.kept)
    metrics.registry.register(ShareCollector(rollouts.states))
    num_rows = 0 if base.images is None else base.images.num_rows
    modes = make_modes(config, base.merged, residencies)
    options = {"modes": modes, "speculation": make_speculation(config, metrics)}
    options["extents"] = None if base.pool is None else base.pool.extents
    options["num_logit_rows"] = rows
    scheduler = make_scheduler(config, base.size, residencies, end_ids, num_rows, **options)
    loop = EngineLoop(
        LoopParts(
            runner,
            scheduler,
            registry,
            residencies,
            metrics,
            compilations,
            grammars.result(),
            config.adapter_load_chunks_per_step,
            rollouts.finished,
            compositions,
            traces,
            turns,
        )
    )
    residencies.call_on_news(loop.wake)
    metrics.set_source(lambda: engine_stats(loop, registry, residencies, metrics, compilations))
    front = None
    if base.images is not None:
        front = make_front(config, base.images, base.config, tokenizer, base.size.max_model_len)
    observers = metrics, compilations, loop, info, front, grammars.result()
    kept = config, tokenizer, tokenizers, registry, rollouts, compositions, residencies
    return EngineParts(*kept, *observers, gang, scheduler.remember_prefixes, primary)


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
    for_adapter = scheduler.num_waiting_adapter + len(registry.line)
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting_capacity + for_adapter,
        waiting_for_adapter=for_adapter,
        kv_usage=scheduler.kv_usage,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        preemptions=scheduler.num_preemptions,
        image_stats=scheduler.images,
        host_pages=scheduler.host_pages,
        pool=scheduler.pool,
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


def _make_grammars(config: EngineConfig, tokenizer: Tokenizer, info: ModelInfo) -> Grammars:
    if not config.structured_outputs:
        off = "structured_outputs are off: start without --no-structured-outputs."
        return Grammars(None, why_none=off)
    vocabulary = vocabulary_of(tokenizer, info.vocab_size, info.end_token_ids)
    on_cpu = jax.default_backend() == "cpu"  # whose cores compute the step
    return Grammars(vocabulary, most_threads=THREADS if on_cpu else THREADS_BESIDE_DEVICE)


def _make_metrics(config: EngineConfig, info: ModelInfo) -> EngineMetrics:
    cache = {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.kv_pages),
        "cache_dtype": info.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
    return EngineMetrics(info.name, info.max_model_len, cache, config.max_loras)
