"""Shared engine for tests: a tiny random model, requests, and a wait for idleness."""

import contextlib
import dataclasses
import threading
import time

import numpy as np
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.waiting import wait_until

from serving import Engine, Sampling

SHAPES = {"llama": TinyShape(max_positions=96), "mixtral": TinyShape(max_positions=96, experts=4)}
NUM_PAGES = 60  # few enough that 8 long sequences do not fit
PAGE_BYTES = {"float32": 1024, "bfloat16": 512}
RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
SCORED = dataclasses.replace(GREEDY, logprobs=2)


def make_engine(folder, shape, dtype="float32"):
    """An engine over a new random model with adapters a0 to a7 and lora_dir `folder`/more."""
    tiny_checkpoint.write_model(folder / "model", shape)
    adapters = {}
    for place, rank in enumerate(RANKS):
        path = folder / f"a{place}"
        tiny_checkpoint.write_adapter(path, shape, rank, seed=place)
        adapters[path.name] = str(path)
    (folder / "more").mkdir()
    return Engine(
        str(folder / "model"),
        adapters=adapters,
        dtype=dtype,
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=4,
        kv_cache_memory_bytes=NUM_PAGES * PAGE_BYTES[dtype],
        max_loras=16,
        max_lora_rank=8,
        max_queue=400,
        structured_outputs=False,
        override_generation_config={"temperature": 0, "top_k": 9, "max_new_tokens": 5},
        lora_dir=str(folder / "more"),
    )


def settle(engine, seconds=60.0):
    """Wait until nothing runs, and check that nothing is held."""
    end = time.monotonic() + seconds
    while (stats := engine.stats()).running or stats.waiting:
        assert time.monotonic() < end, f"still {stats.running} running, {stats.waiting} waiting"
        time.sleep(0.01)
    while True:
        try:
            engine.check_integrity()
            return
        except AssertionError:  # the last step may still be on the device, a load under way
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


@contextlib.contextmanager
def planned_together(engine, count):
    """The engine plans no step before `count` sequences wait, so that they run beside one another.

    Else the first ones may have ended when the test's thread asks for the last ones.
    """
    loop, have_come = engine._loop, False
    plan = loop._plan

    def plan_all(now):
        nonlocal have_come
        wait_until(lambda: have_come or engine.stats().waiting >= count)
        have_come = True
        return plan(now)

    loop._plan = plan_all
    try:
        yield
    finally:
        have_come = True
        del loop._plan


def prompts_of(count, seed=0, low=3, high=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 260, rng.integers(low, high)).tolist() for _ in range(count)]


def answer(output):
    """Everything a caller sees of the first choice."""
    first = output.outputs[0]
    return first.token_ids, first.text, first.logprobs, first.finish_reason, output.prompt_logprobs


class Listener:
    """Collects the deltas of one request; `finished` is set by the last one."""

    def __init__(self):
        self.deltas, self.finished = [], threading.Event()

    def __call__(self, delta):
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.finished.set()

    def tokens(self):
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    def wait(self):
        assert self.finished.wait(120)
        return self.deltas[-1]


class HeldListener(Listener):
    """Holds the engine's thread with its first delta until `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def __call__(self, delta):
        super().__call__(delta)
        assert self.go_on.wait(120)


def mixed_requests(seed=1):
    """32 requests over base and 8 adapters, with every kind of sampling."""
    kinds = [
        SCORED,
        Sampling(max_tokens=30, temperature=1.0, seed=3, top_k=20, logprobs=0, ignore_eos=True),
        Sampling(max_tokens=25, temperature=0.7, seed=4, top_p=0.9, frequency_penalty=0.5),
        Sampling(max_tokens=20, temperature=0.0, prompt_logprobs=1, repetition_penalty=1.2),
        Sampling(max_tokens=15, temperature=1.2, seed=5, min_p=0.02, logit_bias={70: 4.0}),
    ]
    names = [None, *(f"a{place}" for place in range(8))]
    prompts = prompts_of(32, seed)
    return [(p, names[i % 9], kinds[i % 5]) for i, p in enumerate(prompts)]
