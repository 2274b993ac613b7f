"""Parts of an engine that plan and run its steps: the scheduler and the model runner."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from lora_jax.adapters.slots import init_slots
from lora_jax.adapters.task_head import SCORE
from serving.api.config import EngineConfig
from serving.engine.memory.sizing import CacheSize
from serving.engine.memory.storage import kv_dtype, lora_dtype
from serving.engine.parts.image_parts import make_encoder
from serving.engine.parts.loaded_base import LoadedBase
from serving.engine.parts.merging import AUTO
from serving.engine.parts.over_hosts import teller
from serving.engine.parts.slot_parts import SlotParts
from serving.loading.residencies import Residencies
from serving.runtime import xla_memory
from serving.runtime.gang import Gang
from serving.runtime.program_cache import step_files
from serving.scheduling.scheduler import Scheduler, SchedulerLimits
from serving.steps.kept_steps import KeptSteps, identity
from serving.steps.model_runner import ModelRunner
from serving.steps.runner_parts import ProgramChoice, StepAdapters, StepModel
from serving.steps.sampling.mask_board import make_board
from serving.steps.step import StepSizes

logger = logging.getLogger(__name__)

# Of EngineConfig: what the host alone reads. Programs are the same whatever they say.
_OF_HOST = frozenset(
    {
        "model",  # a path; identity reads the config in it
        "served_model_name",
        "enable_prefix_caching",
        "scheduling_policy",
        "max_queue",
        "seed",
        "chat_template",
        "generation_config",
        "override_generation_config",
        "mm_processor_cache_gb",
        "lora_dir",
        "max_adapter_bytes",
        "max_total_adapter_bytes",
        "max_cpu_loras",
        "max_adapter_loads_per_minute",
        "adapter_wait_s",
        "lora_merge_theta",
        "otlp_traces_endpoint",
    }
)
_SCORED = 4  # tokens of prompts in a step of a function whose other rows all draw


def make_runner(
    config: EngineConfig,
    base: LoadedBase,
    adapter_slots: SlotParts,
    end_ids: tuple[int, ...],
    gang: Gang | None,
    *,
    num_logit_rows: int,
    settle: Callable[[], object],
) -> ModelRunner:
    """Return the runner of the model's steps with every program compiled.

    `settle` is called before anything is compiled, and raises what ends the start.
    With `gang` the runners of all members are made together. `num_logit_rows` is `logit_rows`.
    """
    start = time.monotonic()
    link = None if base.remote is None else base.remote.link
    names, longest = base.catalogue.module_names, base.size.max_model_len
    where = names, longest, base.split
    encoder = base.images and make_encoder(config, base.images, base.config, *where)
    sizes = _step_sizes(config, base, num_logit_rows)
    alone = base.split is None and link is None and not base.source.is_shared
    waits = config.structured_outputs and alone
    of_model = StepModel(
        base.model,
        base.model.kv_shape(base.config),
        base.config.vocab_size,
        kv_dtype(config, base.dtype),
        end_ids=end_ids,
        split=base.split,
        encoder=encoder,
        pooled=None if base.pool is None else base.pool.room.pages.cache,
    )
    choice = ProgramChoice(
        config.step_tokens,
        # On a CPU the adapters' kernels return at once where no row has an adapter, but exchanges
        # that nobody needs take a third of a small model's step.
        base_only=config.compile_base_only_steps
        and (jax.default_backend() != "cpu" or link is not None),
        structured_outputs=config.structured_outputs,
        board=make_board(sizes, base.config.vocab_size) if waits else None,
        kept=_kept_steps(config, base),
    )
    adapters = _step_adapters(config, base, adapter_slots)
    runner = ModelRunner(of_model, sizes, choice, adapters, tell=teller(gang))
    _warm_up(runner, gang, settle)
    logger.info(
        "%d programs for steps of up to %s tokens are ready after %.1f s.",
        runner.num_programs,
        ", ".join(map(str, runner.buckets)),
        time.monotonic() - start,
    )
    return runner


def _step_adapters(
    config: EngineConfig, base: LoadedBase, adapter_slots: SlotParts
) -> StepAdapters:
    """Return what adapters of every kind add to the model's steps."""
    rows = None if base.pool is None else base.pool.room.rows.arrays
    dtype = lora_dtype(config, base.dtype)
    return StepAdapters(
        init_slots(base.catalogue, adapter_slots.spec, dtype, base.split, rows),
        bringing=adapter_slots.bringing,
        row_writer="copier" if adapter_slots.copies_rows else "programs",
        reroute_tables=None if base.esft is None else base.esft.tables,
        link=None if base.remote is None else base.remote.link,
        merged=base.merged,
        mixture=config.lora_merge == AUTO,
    )


def _warm_up(runner: ModelRunner, gang: Gang | None, settle: Callable[[], object]) -> None:
    """Compile and run all programs; ValueError says what to change if a step's arrays do not fit.

    KV pages and adapters leave what was planned for them before a program was there.
    """

    # The first exchange waits half a minute for the others, and some hosts compile longer.
    def compiled(programs: Iterable[Compiled]) -> None:
        xla_memory.check_room(programs)
        if gang is not None:
            gang.meet()

    try:
        runner.warm_up(progress=True, compiled=compiled, settle=settle)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            "A step's own arrays have no room beside weights, adapters and KV pages. "
            f"{xla_memory.LESS} The device says: {error}"
        ) from error


def _kept_steps(config: EngineConfig, base: LoadedBase) -> KeptSteps | None:
    """Return where steps are kept in files, which another start reads instead of tracing them.

    On a GPU it was tried without ESFT adapters and page pool. Functions there compile none.
    """
    alone, backend = base.split is None and base.remote is None, jax.default_backend()
    tried = backend == "gpu" and base.esft is None and base.pool is None
    keeps = backend == "cpu" or tried or base.source.is_shared
    files = step_files() if alone and keeps else None
    if files is None:
        return None
    given = dataclasses.asdict(config)
    fields = {name: value for name, value in given.items() if name not in _OF_HOST}
    # The config may leave to the adapters what they change.
    fields["lora_target_modules"] = base.catalogue.module_names
    # Functions start again and again. Programs of a CPU are small: a late one costs little.
    starts = {"anew": base.source.is_shared, "lazy": backend == "cpu" or base.source.is_shared}
    return KeptSteps(*files, identity(fields, Path(config.model)), **starts)


def logit_rows(config: EngineConfig, *, shares_device: bool) -> int:
    """Return the most tokens of one step whose logits are computed.

    Each of several functions on an accelerator takes memory for them: the sampler's arrays of a row
    of Llama-2's vocabulary are 0.6 MiB. So such an engine has a few more rows than sequences, and
    log-probabilities of prompts take more steps there.
    """
    if not shares_device or jax.default_backend() == "cpu":
        return config.max_logit_rows
    rows = config.step_seqs * (1 + config.max_drafts) + _SCORED
    return min(config.max_logit_rows, rows)


def _step_sizes(config: EngineConfig, base: LoadedBase, num_logit_rows: int) -> StepSizes:
    size, head = base.size, base.catalogue.modules.get(SCORE)
    return StepSizes(
        max_seqs=config.step_seqs,
        max_len=size.max_model_len,
        page_size=size.page_size,
        num_pages=size.num_pages,
        max_logit_rows=num_logit_rows,
        max_rank=config.max_lora_rank,
        max_drafts=config.max_drafts,
        head_width=0 if head is None else head.d_out,
        num_host_pages=size.num_host_pages,
        pooled=base.pool is not None,
        reads_rows=jax.default_backend() == "cpu",  # elsewhere it was not run
        page_stride=1 if base.pool is None else base.pool.room.pages.stride,
    )


def make_scheduler(
    config: EngineConfig,
    size: CacheSize,
    residencies: Residencies,
    end_ids: tuple[int, ...],
    num_encoder_rows: int,
    *,
    num_logit_rows: int,
    **how: Any,
) -> Scheduler:
    """Return the scheduler within the config's limits and the cache's size."""
    limits = SchedulerLimits(
        num_pages=size.num_pages,
        page_size=size.page_size,
        max_model_len=size.max_model_len,
        max_num_seqs=config.step_seqs,
        max_num_batched_tokens=config.step_tokens,
        mixed_step_tokens=config.mixed_step_tokens,
        max_logit_rows=num_logit_rows,
        max_queue=config.max_queue,
        adapter_wait_s=config.adapter_wait_s,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        num_encoder_rows=num_encoder_rows,
        num_host_pages=size.num_host_pages,
    )
    fixed = {"eos_token_ids": end_ids, "seed": config.seed}
    return Scheduler(limits, adapters=residencies, **fixed, **how)
