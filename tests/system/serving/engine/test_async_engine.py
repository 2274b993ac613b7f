"""Awaited answers are the engine's own; what leaves early is aborted; errors name themselves."""

import asyncio
import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.cases.engine_cases import GREEDY, settle

from lora_jax.adapters.registry_errors import HostFull
from serving import AsyncEngine, Engine, FinishReason, OutputDelta, RequestFailed, Sampling
from serving.api.request import EngineDead

LONG = dataclasses.replace(GREEDY, max_tokens=64)
LIMIT_S = 120.0  # for an event that comes


@pytest.fixture
def waiting(real_engine: Engine) -> AsyncEngine:
    return AsyncEngine(real_engine)


def run(main):
    """What a coroutine returns; it fails rather than waits for ever."""

    async def limited():
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(limited())


async def outputs_of(generator) -> list:
    return [output async for output in generator]


def test_many_at_once_answer_as_the_engine_does(waiting):
    requests = [("hello", None), ("hello", "a"), ("what", "b"), ([70, 71, 72], "c"), ("x", "a")]
    sampling = dataclasses.replace(GREEDY, logprobs=1)
    want = [waiting.engine.generate(p, name, sampling)[0] for p, name in requests]

    async def all_at_once():
        asked = [
            outputs_of(waiting.generate(prompt, sampling, f"r{i}", adapter=name))
            for i, (prompt, name) in enumerate(requests)
        ]
        return await asyncio.gather(*asked)

    for place, (outputs, whole) in enumerate(zip(run(all_at_once()), want, strict=True)):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        texts = [output.outputs[0].text for output in outputs]
        pairs = itertools.pairwise(texts)
        assert all(longer.startswith(shorter) for shorter, longer in pairs)
        same = dataclasses.replace(whole, request_id=f"r{place}", num_cached_tokens=0)
        assert dataclasses.replace(outputs[-1], num_cached_tokens=0) == same


def test_stream_and_chat_give_the_same_text(waiting):
    (want,) = waiting.engine.generate("hello", {"a": 0.5, "b": 0.5}, GREEDY)

    async def both():
        pieces = waiting.stream("hello", GREEDY, adapter={"a": 0.5, "b": 0.5})
        text = "".join([piece.text async for piece in pieces])
        told = await outputs_of(
            waiting.chat(
                [{"role": "user", "content": "hi"}],
                sampling_params=GREEDY,
                chat_template_kwargs={"a": 1},
            )
        )
        return text, told[-1]

    text, told = run(both())
    assert text == want.outputs[0].text
    (chat,) = waiting.engine.chat([{"role": "user", "content": "hi"}], None, GREEDY)
    assert told.outputs == chat.outputs


def test_choices_of_one_request_come_together(waiting):
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3, n=3, ignore_eos=True)
    (want,) = waiting.engine.generate("hello", "a", sampling)
    outputs = run(outputs_of(waiting.generate("hello", sampling, adapter="a")))
    assert outputs[-1].outputs == want.outputs
    assert len(outputs[0].outputs) == 3


class Gate:
    """Holds the engine's thread after the first delta until something is aborted."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self._opened, self.deltas = threading.Event(), []
        self.ended = threading.Event()
        submit, abort = engine.submit, engine.abort

        def submitting(*args, on_output, **kwargs):
            def held(delta: OutputDelta) -> None:
                self.deltas.append(delta)
                on_output(delta)
                assert self._opened.wait(LIMIT_S)
                if delta.finish_reason is not None:
                    self.ended.set()

            return submit(*args, on_output=held, **kwargs)

        def aborting(request_id: str) -> None:
            abort(request_id)
            self._opened.set()

        monkeypatch.setattr(engine, "submit", submitting)
        monkeypatch.setattr(engine, "abort", aborting)

    def check(self) -> None:
        """The request has ended by the abort."""
        assert self.ended.wait(LIMIT_S)
        assert self.deltas[-1].finish_reason is FinishReason.ABORT
        assert len(self.deltas) < LONG.max_tokens


@pytest.mark.parametrize("way", ["generate", "stream", "chat"])
def test_a_canceled_task_aborts_its_request(waiting, monkeypatch, way):
    gate = Gate(waiting.engine, monkeypatch)

    async def canceled():
        begun = asyncio.Event()

        async def ask():
            prompt = [{"role": "user", "content": "hi"}] if way == "chat" else "hello"
            async for _ in getattr(waiting, way)(prompt, LONG):
                begun.set()

        task = asyncio.create_task(ask())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(canceled())
    gate.check()
    settle(waiting.engine)


def test_a_task_canceled_while_its_prompt_is_read_leaves_nothing(waiting, monkeypatch):
    """The thread submits although nobody waits for it any more."""
    gate = Gate(waiting.engine, monkeypatch)
    reading, go_on = threading.Event(), threading.Event()
    default = waiting.engine.default_sampling

    def slow_default() -> Sampling:
        reading.set()
        assert go_on.wait(LIMIT_S)
        return default()

    monkeypatch.setattr(waiting.engine, "default_sampling", slow_default)

    async def canceled():
        task = asyncio.create_task(outputs_of(waiting.generate("hello", LONG)))
        await asyncio.to_thread(reading.wait, LIMIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    run(canceled())
    gate.check()
    settle(waiting.engine)


def test_requests_that_wait_for_host_memory_hold_no_thread(waiting, monkeypatch):
    """Those for adapters in memory pass them, and one that is canceled waits no longer."""
    registry, rollouts, is_full = waiting.engine.registry, waiting.engine.rollouts, [True]
    find, resolve = registry.find, rollouts.resolve

    def full_resolve(name, share=None, deadline=float("inf"), ticket=None):
        if name == "a" and is_full and ticket is not None:
            registry.line.enter(ticket, name)
            raise HostFull("full.")
        return resolve(name, share, deadline, ticket)

    monkeypatch.setattr(
        registry, "find", lambda name, t: None if name == "a" and is_full else find(name, t)
    )
    monkeypatch.setattr(rollouts, "resolve", full_resolve)

    async def ask():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        asked = [
            asyncio.create_task(outputs_of(waiting.generate("hello", GREEDY, adapter="a")))
            for _ in range(4)
        ]
        while len(registry.line) < len(asked):
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):
            passing = await outputs_of(waiting.generate("hello", GREEDY, adapter="b"))
        asked.pop().cancel()
        while len(registry.line) > len(asked):
            await asyncio.sleep(0.001)
        is_full.clear()
        registry.line.arrived("a")
        return passing, await asyncio.gather(*asked)

    passing, others = run(ask())
    assert passing[-1].finished
    (want,) = waiting.engine.generate("hello", "a", GREEDY)
    assert {outputs[-1].outputs[0].text for outputs in others} == {want.outputs[0].text}


def test_an_abort_by_id_ends_the_answer_with_what_there_is(waiting, monkeypatch):
    Gate(waiting.engine, monkeypatch)

    async def aborted():
        outputs = []
        async for output in waiting.generate("hello", LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 1:
                with pytest.raises(ValueError, match="id 'mine' is running"):
                    await outputs_of(waiting.generate("hello", LONG, "mine"))
                await waiting.abort("mine")
        return outputs

    outputs = run(aborted())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
    assert outputs[-1].request_id == "mine"
    settle(waiting.engine)


def test_mistakes_are_named_and_the_next_request_works(waiting):
    async def refused(error, match, *args, **kwargs):
        with pytest.raises(error, match=match):
            await outputs_of(waiting.generate(*args, **kwargs))

    async def all_refused():
        await refused(KeyError, "'nobody' does not exist", "x", GREEDY, adapter="nobody")
        await refused(TypeError, "sampling is given twice", "x", GREEDY, sampling_params=GREEDY)
        await refused(TypeError, "got str", "x", "id")
        await refused(ValueError, "prompt token id must be in", [10**6], GREEDY)
        return await outputs_of(waiting.generate("x", GREEDY, lora_request="a"))

    assert run(all_refused())[-1].adapter == "a"
    with pytest.raises(TypeError, match=r"AsyncEngine\(Engine\(model"):
        AsyncEngine("path/to/model")  # type: ignore[arg-type]


def test_adapters_come_and_go(waiting, real_lora_dir):
    async def visit():
        info = await waiting.load_adapter("guest", real_lora_dir / "b")
        (*_, last) = await outputs_of(waiting.generate("x", GREEDY, adapter="guest"))
        await waiting.unload_adapter("guest")
        with pytest.raises(KeyError, match="guest"):
            await outputs_of(waiting.generate("x", GREEDY, adapter="guest"))
        return info, last

    info, last = run(visit())
    assert info.name == last.adapter == "guest"


def test_a_chat_is_one_conversation(waiting):
    one = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="takes one conversation, got 2"):
        run(outputs_of(waiting.chat([one, one], GREEDY)))
    with pytest.raises(TypeError, match=r"AsyncEngine\.chat has no option 'use_tqdm'"):
        run(outputs_of(waiting.chat(one, GREEDY, use_tqdm=True)))


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_request_that_fails_raises(waiting, monkeypatch, way):
    def failing(ids, adapter, sampling, *, on_output, request_id, **more):
        error = {"finish_reason": FinishReason.ERROR, "error": "no", "retryable": True}
        on_output(OutputDelta(request_id, 0, "", (), **error))
        return request_id

    monkeypatch.setattr(waiting.engine, "submit", failing)
    with pytest.raises(RequestFailed, match="no") as caught:
        run(outputs_of(getattr(waiting, way)("x", GREEDY)))
    assert caught.value.retryable


def test_leaving_the_context_closes_the_engine(waiting, monkeypatch):
    """The shared engine must live on, so its own `close` is replaced."""
    closed = []
    monkeypatch.setattr(waiting.engine, "close", lambda: closed.append(True))

    async def leave():
        async with waiting as entered:
            assert entered is waiting

    run(leave())
    assert closed == [True]

    def dead(*_, **__):
        raise EngineDead("The engine has stopped.")

    monkeypatch.setattr(waiting.engine, "submit", dead)
    with pytest.raises(EngineDead, match="has stopped"):
        run(outputs_of(waiting.generate("x", GREEDY)))
