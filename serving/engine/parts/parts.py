"""Builds the parts of an engine from its config, with a log line for each."""

import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax

from lora_jax.adapters import vocabulary
from lora_jax.adapters.registry import AdapterRegistry
from lora_jax.memory.arena import ImportedArena
from lora_jax.ops import dispatch
from serving.adapters.rollouts import Rollouts
from serving.api.config import EngineConfig
from serving.engine.images.front import ImageFront
from serving.engine.loop.loop import EngineLoop
from serving.engine.loop.loop_parts import AbstractTurns, LoopParts
from serving.engine.metrics.draft_metrics import make_speculation
from serving.engine.metrics.metrics import EngineMetrics
from serving.engine.metrics.stats import EngineStats
from serving.engine.metrics.traces import Traces, make_traces
from serving.engine.metrics.version_metrics import ShareCollector
from serving.engine.parts.engine_start import EngineStart, prepare
from serving.engine.parts.image_parts import make_front, watch_tower
from serving.engine.parts.loaded_base import LoadedBase, load_base
from serving.engine.parts.merging import make_modes, merge_primary, watch_merging
from serving.engine.parts.model_info import ModelInfo, model_info
from serving.engine.parts.registries import load_adapters, make_registry
from serving.engine.parts.slot_parts import SlotParts, make_slots
from serving.engine.parts.step_parts import logit_rows, make_runner, make_scheduler
from serving.loading.compositions import Compositions
from serving.loading.residencies import Residencies
from serving.lora_server.sides import RemoteAccess
from serving.runtime.compile_counter import CompileCounter
from serving.runtime.gang import Gang
from serving.scheduling.scheduler import Scheduler
from serving.steps.device_users import USERS
from serving.steps.model_runner import ModelRunner
from serving.text.adapter_tokenizers import AdapterTokenizers
from serving.text.structured.grammars import Grammars
from serving.text.structured.row_masks import THREADS, THREADS_BESIDE_DEVICE
from serving.text.structured.vocabulary import vocabulary_of
from serving.text.tokenizer import Tokenizer


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

    def stats(self) -> EngineStats:
        """Return where the engine stands; any thread may ask."""
        scheduler, on_device = self.loop.scheduler_stats(), self.residencies.snapshot
        entries = self.registry.entries()
        sizes = {entry.digest: (entry.kind, entry.report.weight_bytes) for entry in entries}
        by_kind: dict[str, int] = {}
        for kind, size in sizes.values():
            by_kind[kind] = by_kind.get(kind, 0) + size
        for_adapter = scheduler.num_waiting_adapter + len(self.registry.line)
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
            prompt_tokens=self.metrics.prompt_tokens,
            generation_tokens=self.metrics.generation_tokens,
            adapters_loaded=len(entries),
            adapter_slots_used=on_device.slots_used,
            adapter_slots_total=on_device.slots_total,
            adapter_swaps=on_device.swaps,
            adapter_bytes=by_kind,
            adapter_device_bytes=on_device.bytes_used,
            expert_page_bytes=on_device.expert_page_bytes,
            resident_adapters=tuple(e.name for e in entries if e.digest in on_device.resident),
            waiting_adapters=scheduler.waiting_adapters,
            compilations_after_warmup=self.compilations.count,
            steps=self.loop.num_steps,
            implementations=dispatch.table(),
        )

    def close(self) -> None:
        """End the loop, leave devices and other processes, and free what the engine held."""
        self.loop.close()
        self.leave()
        if self.gang is not None:
            self.gang.close()
        self.compilations.close()
        # flax leaves cycles around the model's weights, which keep device memory.
        gc.collect()


def build_parts(
    config: EngineConfig,
    adapters: Mapping[str, str | os.PathLike[str]],
    access: RemoteAccess | None = None,
    backbone: ImportedArena | None = None,
    turns: AbstractTurns | None = None,
    gang: Gang | None = None,
    pinned: Collection[str] = (),
) -> EngineParts:
    """Load the model and the named adapters, compile, and return the parts; nothing runs yet.

    With `access` the experts' part of LoRA adapters is on a LoRA Server, or all of it in tenants'
    processes; with `backbone` the weights are another process's, with `turns` the device is
    others' too, with `gang` the devices are those of several processes, which all build the same.
    The adapters named in `pinned` stay on the device. Raises ValueError for a model or an adapter
    that cannot be served, and ConnectionError when the server cannot be reached or does not fit.
    """
    start = prepare(config, adapters, access, backbone, gang)
    config = start.config
    with ExitStack() as undo:
        use = undo.enter_context(ExitStack())
        use.enter_context(USERS.use())
        traces = make_traces(config.otlp_traces_endpoint, config.model_name)
        if traces is not None:
            undo.callback(traces.close)
        base = load_base(start, adapters, access, gang, undo)
        load = functools.partial(load_adapters, adapters=adapters, pinned=pinned)
        parts = _assemble(start, base, load, traces, turns, gang, leave=use.close)
        undo.pop_all()  # nothing is undone; `use` ends when the engine leaves its devices
        return parts


def _assemble(
    start: EngineStart,
    base: LoadedBase,
    load: Callable[[AdapterRegistry], None],
    traces: Traces | None,
    turns: AbstractTurns | None,
    gang: Gang | None,
    leave: Callable[[], None],
) -> EngineParts:
    """Return the parts around a model that is loaded, with every program compiled.

    `load` fills the registry with the adapters that are given at the start.
    """
    config, host = start.config, _host_parts(start, base, gang)
    residencies, metrics = host.slots.residencies, host.metrics
    num_logit_rows = logit_rows(config, shares_device=turns is not None)
    sizes = config, base, host.slots, host.info.end_token_ids, gang
    make = functools.partial(make_runner, *sizes, num_logit_rows=num_logit_rows)
    runner, grammars, primary = _read_and_compile(start, base, host, load, make)
    watch_merging(metrics.registry, base.merged)
    watch_tower(metrics.registry, runner.encoder)
    compilations = CompileCounter()
    rollouts = _make_rollouts(config, base, host)
    scheduler = _make_scheduler(config, base, host, num_logit_rows)
    loop = EngineLoop(
        LoopParts(
            runner=runner,
            scheduler=scheduler,
            registry=host.registry,
            residencies=residencies,
            metrics=metrics,
            compilations=compilations,
            grammars=grammars,
            chunks_per_step=config.adapter_load_chunks_per_step,
            finished=rollouts.finished,
            compositions=host.compositions,
            traces=traces,
            turns=turns,
        )
    )
    residencies.call_on_news(loop.wake)
    parts = EngineParts(
        config=config,
        tokenizer=start.tokenizer,
        tokenizers=host.tokenizers,
        registry=host.registry,
        rollouts=rollouts,
        compositions=host.compositions,
        residencies=residencies,
        metrics=metrics,
        compilations=compilations,
        loop=loop,
        model_info=host.info,
        images=_make_front(start, base),
        grammars=grammars,
        gang=gang,
        remember_prefixes=scheduler.remember_prefixes,
        primary=primary,
        leave=leave,
    )
    metrics.set_source(parts.stats)
    return parts


@dataclasses.dataclass(frozen=True, eq=False)
class _HostParts:
    """Parts that are made before any program is compiled; threads of a start fill the registry."""

    info: ModelInfo
    metrics: EngineMetrics
    slots: SlotParts
    tokenizers: AdapterTokenizers
    registry: AdapterRegistry
    compositions: Compositions


def _host_parts(start: EngineStart, base: LoadedBase, gang: Gang | None) -> _HostParts:
    config, tokenizer = start.config, start.tokenizer
    info = model_info(
        config, base.weights, base.config, base.size, base.dtype, tokenizer, start.generation
    )
    metrics = _make_metrics(config, info)
    slots = make_slots(config, base, gang, metrics.adapter_loaded_on_device)
    tokenizers = AdapterTokenizers(tokenizer, info.vocab_size)
    registry, compositions = make_registry(
        config, base, slots.residencies, metrics.tiers.read, tokenizers.fitted
    )
    return _HostParts(info, metrics, slots, tokenizers, registry, compositions)


def _make_scheduler(
    config: EngineConfig, base: LoadedBase, host: _HostParts, num_logit_rows: int
) -> Scheduler:
    residencies = host.slots.residencies
    return make_scheduler(
        config,
        base.size,
        residencies,
        host.info.end_token_ids,
        0 if base.images is None else base.images.num_rows,
        num_logit_rows=num_logit_rows,
        modes=make_modes(config, base.merged, residencies),
        speculation=make_speculation(config, host.metrics),
        extents=None if base.pool is None else base.pool.extents,
    )


def _make_front(start: EngineStart, base: LoadedBase) -> ImageFront | None:
    if base.images is None:
        return None
    longest = base.size.max_model_len
    return make_front(start.config, base.images, base.config, start.tokenizer, longest)


def _read_and_compile(
    start: EngineStart,
    base: LoadedBase,
    host: _HostParts,
    load: Callable[[AdapterRegistry], None],
    make: Callable[..., ModelRunner],
) -> tuple[ModelRunner, Grammars, str | None]:
    """Return the runner that `make` gives, the grammars, and the digest of a merged adapter.

    Two threads read the adapters' files and prepare grammars, which takes two seconds for 152,000
    tokens, while programs that are kept are read. Compiling takes longer: it waits for the
    adapters, one of which may be wrong.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="start") as pool:
        grammars = pool.submit(_make_grammars, start.config, start.tokenizer, host.info)
        loading = pool.submit(load, host.registry)
        if start.config.merge_adapter is not None:  # it is in the weights that programs take
            loading.result()
        primary = merge_primary(start.config, base.model, host.registry)
        runner = make(settle=loading.result)
        loading.result()
    return runner, grammars.result(), primary


def _make_rollouts(config: EngineConfig, base: LoadedBase, host: _HostParts) -> Rollouts:
    """Return the rollouts of versions, which the registry, tokenizers and metrics then ask."""
    rollouts = Rollouts(host.registry)
    if vocabulary.brings_tokens(base.catalogue):
        wait_s = config.adapter_wait_s
        host.tokenizers.ask(functools.partial(rollouts.entry_for, wait_s=wait_s, lends=False))
    host.registry.set_kept(rollouts.kept)
    host.metrics.registry.register(ShareCollector(rollouts.states))
    return rollouts


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
