"""The runner against a numpy forward pass, and the promises that a step makes."""

import functools
import pickle
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.models import load
from lora_jax.ops.kv_rows import CODED
from serving.api.request import Merged, Request, ScheduledChunk, StepPlan
from serving.api.sampling import Sampling
from serving.scheduling.scheduler import Scheduler, SchedulerLimits
from serving.steps import model_runner as module
from serving.steps.compiled_step import CompiledStep
from serving.steps.model_runner import ModelRunner, token_buckets
from serving.steps.runner_parts import ProgramChoice, StepModel
from serving.steps.step import StepSizes
from serving.steps.step_programs import Program, StepPrograms
from serving.steps.step_results import InFlightStep

SHAPE = TinyShape()
NUM_PAGES, PAGE_SIZE, MAX_SEQS, MAX_LEN = 60, 4, 4, 64
MAX_TOKENS = 32  # programs of 8 and 32 tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny_checkpoint.write_model(folder, SHAPE), load(folder)


@pytest.fixture(scope="module")
def noted(checkpoint):
    return note(checkpoint[1])


@pytest.fixture(scope="module")
def runner(noted):
    return noted.runner


def make_runner(loaded, max_tokens, dtype="float32"):
    model, config = loaded
    sizes = StepSizes(
        max_seqs=MAX_SEQS,
        max_len=MAX_LEN,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_logit_rows=48,
        max_rank=8,
    )
    runner = ModelRunner(
        StepModel(model, model.kv_shape(config), SHAPE.vocab, jnp.dtype(dtype), end_ids=(2,)),
        sizes,
        ProgramChoice(max_tokens),
    )
    runner.warm_up()
    return runner


def drive(
    runner,
    requests,
    *,
    max_tokens=MAX_TOKENS,
    num_pages=NUM_PAGES,
    ahead=1,
    in_parts=False,
    told=None,
):
    """Run (prompt, sampling) pairs to the end; return each one's results in order.

    `ahead` steps are on the device before the results of the first are read. With `in_parts` every
    other step is two programs, with a mask of even tokens for the last request. `told` gets the
    scheduler's statistics.
    """
    limits = SchedulerLimits(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=max_tokens,
        max_logit_rows=48,
    )
    scheduler = Scheduler(limits, eos_token_ids=(2,))
    results = {}
    for place, (prompt, sampling) in enumerate(requests):
        request = Request(str(place), tuple(prompt), sampling, None, "", print, 0.0, float(place))
        scheduler.add(request)
        results[str(place)] = []
    flying = []
    while scheduler.has_work or flying:
        plan = scheduler.plan(time.monotonic())
        if plan is not None:
            is_in_parts = in_parts and len(flying) % 2 == 0
            flying.append(
                (dispatch_in_parts if is_in_parts else type(runner).dispatch)(runner, plan)
            )
        if flying and (plan is None or len(flying) > ahead):
            step = flying.pop(0)
            for progress in scheduler.complete(step.plan, runner.read(step), time.monotonic()):
                results[progress.sequence.request.request_id].append(progress.result)
    scheduler.check_integrity()
    if told is not None:
        told.append(scheduler.stats())
    return [results[str(place)] for place in range(len(requests))]


def dispatch_in_parts(runner, plan):
    """Dispatch a step in two parts; the row of the request that came last takes even tokens."""
    held, masks = runner.forward(plan), runner.new_masks()
    masks.words[:] = 0x55555555
    for chunk, first in zip(plan.chunks, held.first_samples, strict=True):
        if chunk.samples and chunk.sequence.request.sampling.stop_token_ids == EVEN:
            masks.row_to_mask[first] = 0
    return runner.sample(held, masks)


PROGRAMS = ("jit(step)", "jit(forward)", "jit(sample_part)")
EVEN = (3,)  # the mark of a request whose tokens are masked


def tokens_of(results):
    return [result.token_id for result in results if result.token_id is not None]


def prompts_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, SHAPE.vocab, rng.integers(3, 30)).tolist() for _ in range(count)]


SCORED = Sampling(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)


def test_tokens_and_logprobs_are_those_of_a_numpy_forward_pass(checkpoint, runner):
    tensors = checkpoint[0]
    prompts = prompts_of(5)
    for prompt, results in zip(prompts, drive(runner, [(p, SCORED) for p in prompts]), strict=True):
        ids = prompt + tokens_of(results)
        logits = tiny_checkpoint.forward(tensors, SHAPE, ids)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        entries = [e for r in results for e in r.prompt_logprobs]
        entries += [r.logprobs for r in results if r.token_id is not None]
        assert [entry.token_id for entry in entries] == ids[1:]
        for place, entry in enumerate(entries):
            row = logprobs[place]
            np.testing.assert_allclose(entry.logprob, row[entry.token_id], atol=1e-4)
            assert entry.rank == 1 + (row > row[entry.token_id]).sum()
            top = np.argsort(-row)[: len(entry.top)]
            assert list(entry.top) == top.tolist()
            np.testing.assert_allclose(list(entry.top.values()), row[top], atol=1e-4)
            in_prompt = place + 1 < len(prompt)
            assert len(entry.top) == (2 if in_prompt else 3)
            assert in_prompt or entry.rank == 1


MIXED = [
    Sampling(max_tokens=20, temperature=0.0, logprobs=1, ignore_eos=True),
    Sampling(max_tokens=9, temperature=1.0, seed=5, logprobs=0, top_k=40, ignore_eos=True),
    Sampling(max_tokens=30, temperature=0.8, seed=6, top_p=0.9, presence_penalty=1.0),
    Sampling(max_tokens=5, temperature=1.0, seed=5, prompt_logprobs=0, min_tokens=3),
]


@functools.cache
def mixed_requests():
    return [(p, MIXED[i % len(MIXED)]) for i, p in enumerate(prompts_of(11, seed=3))]


def answers(results):
    """Everything a caller can see of one sequence, chunking aside."""
    prompt = [entry for result in results for entry in result.prompt_logprobs]
    return tokens_of(results), [r.logprobs for r in results if r.token_id is not None], prompt


def test_together_is_alone_bit_for_bit(runner):
    together = drive(runner, mixed_requests())
    for request, results in zip(mixed_requests(), together, strict=True):
        assert answers(results) == answers(drive(runner, [request])[0])


def test_chunks_preemption_and_pipelining_change_nothing(checkpoint, runner):
    want = [answers(results) for results in drive(runner, mixed_requests())]
    small = make_runner(checkpoint[1], max_tokens=8)
    chunked = drive(small, mixed_requests(), max_tokens=8)
    assert [answers(results) for results in chunked] == want
    preempted = drive(runner, mixed_requests(), num_pages=18)
    assert [answers(results) for results in preempted] == want
    unpipelined = drive(runner, mixed_requests(), ahead=0)
    assert [answers(results) for results in unpipelined] == want


@pytest.mark.long
def test_pages_in_8_bits_keep_the_bits_in_any_company_and_any_cut(checkpoint, runner):
    coded = make_runner(checkpoint[1], max_tokens=MAX_TOKENS, dtype=CODED)
    requests, told = mixed_requests(), []
    want = [answers(results) for results in drive(coded, requests)]
    assert want != [answers(results) for results in drive(runner, requests)]
    for request, results in list(zip(requests, want, strict=True))[:3]:
        assert answers(drive(coded, [request])[0]) == results
    for changes in ({"max_tokens": 8}, {"num_pages": 18}, {"ahead": 0}):
        got = drive(coded, requests, told=told, **changes)
        assert [answers(results) for results in got] == want
    assert told[1].num_preemptions > 0
    greedy = [(prompt, MIXED[0]) for prompt in prompts_of(6, seed=3)]
    twice = [answers(results) for results in drive(coded, greedy * 2, told=told)]
    assert twice[:6] == twice[6:]
    assert told[-1].prefix_hits > 0


def test_a_step_in_two_programs_changes_no_bit_of_rows_without_a_mask(runner):
    want = [answers(results) for results in drive(runner, mixed_requests())]
    bound = Sampling(max_tokens=20, temperature=1.0, seed=3, stop_token_ids=EVEN)
    requests = [*mixed_requests(), (prompts_of(1, seed=9)[0], bound)]
    *others, even = drive(runner, requests, in_parts=True, ahead=0)
    assert [answers(results) for results in others] == want
    assert tokens_of(even)
    assert all(token % 2 == 0 for token in tokens_of(even))


def note(loaded):
    """Make a runner and drive it; note what is compiled in which thread, and where its cache is."""
    events = []

    def listener(event, seconds, *, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            events.append((fun_name, threading.current_thread()))

    def pointers():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner._cache)]

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        runner = make_runner(loaded, max_tokens=MAX_TOKENS)
        at_start, before = events.copy(), pointers()
        drive(runner, mixed_requests())
        drive(runner, mixed_requests(), in_parts=True, ahead=0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    late = events[len(at_start) :]
    return SimpleNamespace(runner=runner, at_start=at_start, late=late, pages=(before, pointers()))


def test_each_program_is_compiled_once_and_not_in_the_loops_thread(noted):
    threads = [thread for name, thread in noted.at_start if name in PROGRAMS]
    assert len(threads) == noted.runner.num_programs
    assert threading.current_thread() not in threads


class StaysInPlace(CompiledStep):
    """A step as on an accelerator: its memory stays where it is."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields | {"in_place": True})


def test_nothing_compiles_after_warm_up_and_the_cache_stays_in_place(noted):
    before, after = noted.pages
    assert noted.late == []
    assert before == after


@pytest.mark.long
def test_so_it_is_where_memory_stays_as_on_an_accelerator(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "CompiledStep", StaysInPlace)
    test_nothing_compiles_after_warm_up_and_the_cache_stays_in_place(note(checkpoint[1]))


def test_a_step_that_fits_no_program_is_refused(runner):
    prompt = list(range(4, 49))
    with pytest.raises(ValueError, match="A step of 45 tokens and 1 logit rows; at most 32 and 48"):
        drive(runner, [(prompt, Sampling(max_tokens=1))], max_tokens=60)


def test_buckets_grow_by_four_up_to_the_limit():
    assert token_buckets(512) == (8, 32, 128, 512)
    assert token_buckets(600) == (8, 32, 128, 512, 600)
    assert token_buckets(5) == (5,)
    assert token_buckets(600, 256) == (8, 32, 128, 256, 512, 600)
    assert token_buckets(600, 257) == token_buckets(600, 128) == token_buckets(600)
    assert token_buckets(8, 256) == (8,)  # fewer tokens than sequences


def test_a_runner_that_follows_does_the_same_on_its_device(runner, monkeypatch):
    """Steps of both forms, told as another process is, leave the same pages and rows."""

    def device():
        # Copies: the host writes rows where they lie.
        return [np.array(leaf) for leaf in jax.tree.leaves((runner._cache, runner._state))]

    def forget():
        runner._cache = jax.tree.map(jnp.zeros_like, runner._cache)
        runner._step.inputs.set_pages(np.zeros_like(runner._step.inputs.pages))

    commands = []
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_tell", lambda command: commands.append(pickle.dumps(command)))
        drive(runner, mixed_requests(), in_parts=True)
    want = device()
    forget()
    for command in commands:
        runner.follow(pickle.loads(command))
    for mine, others in zip(device(), want, strict=True):
        np.testing.assert_array_equal(mine, others)
    assert any(leaf.any() for leaf in want)


def test_rows_that_wait_for_masks_take_a_program_without_lora_if_no_row_has_an_adapter(monkeypatch):
    runner = ModelRunner.__new__(ModelRunner)
    runner.buckets, runner.sizes = (8, 32, 128), SimpleNamespace(max_seqs=32, max_logit_rows=32)
    runner.slots, runner._num_esft, runner._bringing = SimpleNamespace(num_slots=2), 0, set()
    runner.slots.token_ids, runner.board = (
        None,
        SimpleNamespace(take_number=lambda: 7, begin_wait=lambda number: True),
    )
    runner.merged, ran = object(), []
    kinds = {"merged": True, "base_only": True, "bound": True, "waits": True}
    runner._programs = StepPrograms(runner.buckets, runner.sizes.max_seqs, **kinds)
    monkeypatch.setattr(ModelRunner, "_prepared", lambda self, plan, program: None)
    monkeypatch.setattr(ModelRunner, "_run", lambda self, *given: (ran.append(given), None))
    made = object.__new__(InFlightStep)
    for name, value in {"in_flight": made, "first_rows": (), "is_scored": False}.items():
        monkeypatch.setattr(module, name, lambda *_, value=value: value)

    def dispatched(rows: int, slot: int, *, bound: bool = True, merged: Merged | None = None):
        request = SimpleNamespace(grammar=object() if bound else None, adapter_digest="a")
        slots = [slot if row == 0 else -1 for row in range(rows)]
        sequences = [SimpleNamespace(slot=one, request=request) for one in slots]
        chunks = tuple(ScheduledChunk(sequence, 4, 1, True) for sequence in sequences)
        runner.dispatch(StepPlan(chunks, merged=merged))
        _, program, number = ran[-1]
        assert program in runner.programs
        assert number == (7 if bound else 0)
        return program

    assert dispatched(3, -1) == Program(8, lora=False, bound=True)
    assert dispatched(20, -1) == Program(32, lora=False, bound=True)
    assert dispatched(3, 1) == Program(8, lora=True, bound=True)
    merged = Merged(digest="a", slot=0, name="a")
    assert dispatched(3, -1, merged=merged) == Program(8, lora=True, merged=True, bound=True)
    assert dispatched(3, -1, bound=False) == Program(8, lora=False)
