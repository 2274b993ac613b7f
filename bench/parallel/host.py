"""Processor time of the thread that sends steps and reads results, by number of devices.

`python -m bench.parallel host --devices 1 2 4 --out DIR` sends decode steps of 64 rows with eight
adapters. Arguments and results of a step are as many as those of the model, and the runner is that
of the engine, in place as on a GPU. But weights are narrow and layers are left out, so that devices
compute next to nothing. Numbers of devices take turns in one process. Processor time does not count
waits: where devices take longer than the host, it is less than the time of a step. Other processes
can only add to it, so the least of many short turns is the figure, and the median tells the load.

XLA launches a program of one device in the thread that sends it. One of several is launched by a
thread for each device, for all of which the sending thread waits: `launch_us` is what one of those
threads takes, with the little that a device computes. A step costs the host both.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.stages import Lowered

from bench import decode_step
from bench.decode_step import PAGE_SIZE, RANK
from bench.parallel.steps import MIXED, Sizes
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ForwardBatch, ReadRows
from lora_jax.kv_cache import PagedKVCache
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.remote import RemoteExperts
from lora_jax.sharding import Split
from lora_jax.typing import Array, Float, Int
from serving.api.request import StepPlan
from serving.steps.model_runner import ModelRunner
from serving.steps.runner_parts import ProgramChoice, StepAdapters
from serving.steps.step import StepSizes
from serving.steps.step_programs import Program

TURNS, STEPS = 40, 10
WIDTH = 64  # of what stands for hidden states
NARROW = {  # parts on up to four devices are multiples of 64
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 256,
}
NARROW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


class IdleModel(nnx.Module):
    """Has a model's weights, and computes numbers of no meaning in place of its layers."""

    def __init__(self, model: AbstractCausalLM):
        self.model, self.module_names = model, model.module_names

    def __call__(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        adapters: AdapterSlots | None,
        max_rank: int,
        remote: RemoteExperts | None = None,
        split: Split | None = None,
        read: ReadRows | None = None,
    ) -> tuple[Float[Array, "rows width"], PagedKVCache]:
        """Return numbers for hidden states, of the rows that are read, and the cache as it is."""
        positions = batch.positions if read is None else batch.positions[read.row_to_token]
        return jnp.outer(positions.astype(jnp.float32), jnp.ones(WIDTH)), cache

    def logits(
        self,
        hidden: Float[Array, "rows width"],
        num_rows: Int[Array, ""],
        row_to_slot: Int[Array, "rows"],
        adapters: AdapterSlots | None,
        max_rank: int,
        split: Split | None = None,
        remote: RemoteExperts | None = None,
    ) -> Float[Array, "rows vocab"]:
        """Return hidden states, repeated, for logits."""
        return jnp.tile(hidden, (1, NARROW["vocab_size"] // WIDTH))


def measure(raw: dict[str, Any], devices: list[int], sizes: Sizes) -> list[dict[str, Any]]:
    """Return microseconds of a step for each number of devices, and what a step passes.

    `thread_us` is the processor time of the thread that sends and reads, `launch_us` that of all
    others over the number of devices.
    """
    raw = raw | NARROW | (NARROW_EXPERTS if "num_experts" in raw else {})
    runners = {count: _runner(raw, count, sizes) for count in devices}
    steps = {}
    for count, runner in runners.items():
        where = NARROW["vocab_size"], sizes.rows, sizes.position
        plan = decode_step.make_plan(MIXED, runner, *where)
        for _ in range(2):  # on a GPU the second run makes its CUDA graph
            decode_step.start(runner, plan)
        steps[count] = StepPlan(plan.chunks)
    took: dict[int, list[tuple[float, float]]] = {count: [] for count in devices}
    for _ in range(TURNS):
        for count, runner in runners.items():
            took[count].append(_step_us(runner, steps[count]))
    return [_row(count, runners[count], took[count]) for count in devices]


def _runner(raw: dict[str, Any], devices: int, sizes: Sizes) -> ModelRunner:
    split = decode_step.split_for(raw, devices, None)
    model, config = decode_step.make_model(raw, split)
    pages = -(-(sizes.position + 2) // PAGE_SIZE)
    logit_rows = max(sizes.rows, 8)
    length = pages * PAGE_SIZE
    return ModelRunner(
        dataclasses.replace(decode_step.step_model(model, config, split), model=IdleModel(model)),
        StepSizes(sizes.rows, length, PAGE_SIZE, sizes.rows * pages, logit_rows, RANK),
        ProgramChoice(sizes.rows, in_place=True),
        StepAdapters(decode_step.linear_slots(model, config, split)),
    )


def _step_us(runner: ModelRunner, step: StepPlan) -> tuple[float, float]:
    """Return the processor time of this thread and of the process, in us of a step."""
    last = runner.dispatch(step)
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for _ in range(STEPS):
        last, before = runner.dispatch(step), last
        runner.read(before)
    thread, process = time.thread_time_ns() - thread, time.process_time_ns() - process
    runner.read(last)
    return thread / STEPS / 1e3, process / STEPS / 1e3


def _row(devices: int, runner: ModelRunner, took: list[tuple[float, float]]) -> dict[str, Any]:
    (lowered,) = runner.lowered([Program(runner.buckets[-1])])
    assert isinstance(lowered, Lowered), "this runner keeps no programs"
    threads = [thread for thread, _ in took]
    launches = [(process - thread) / devices for thread, process in took]
    return {
        "devices": devices,
        "arguments": lowered.in_tree.num_leaves,
        "results": lowered.out_tree.num_leaves,
        "thread_us": round(min(threads), 1),
        "launch_us": round(min(launches), 1),
        "median_us": [round(statistics.median(us), 1) for us in (threads, launches)],
    }
