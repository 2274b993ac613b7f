"""Several prompts, one queue: all or none enter the engine, and usage adds up."""

import asyncio

import pytest
from support.doubles.fake_engine import FakeEngine

from serving.api.request import FinishReason, OutputDelta, QueueFull
from serving.api.sampling import Sampling
from serving.http.answers import generation as generation_room
from serving.http.answers.generation import ClientGone, Generation, Piece, usage_of
from serving.http.answers.silence import Silence
from serving.http.errors import ApiError
from serving.http.requests.prompts import Prompt
from serving.runtime.mailbox import Mailbox

PROMPTS = [Prompt([1, 2], None), Prompt([3], "c")]


async def nobody_leaves():
    await asyncio.sleep(3600)


async def collect(engine: FakeEngine, n: int) -> tuple[list[Piece], Generation]:
    generation = Generation(engine, Mailbox(), PROMPTS)
    generation.submit("sql", [Sampling(n=n, max_tokens=3)] * 2, "salt")
    batches = [b async for b in generation.pieces(nobody_leaves, 10.0)]
    return [piece for batch in batches for piece in batch], generation


@pytest.fixture
def engine(lora_dir):
    engine = FakeEngine(lora_dir)
    engine.registry.resolve("sql")
    return engine


def test_choices_are_counted_over_prompts(engine):
    pieces, generation = asyncio.run(collect(engine, n=2))
    assert generation.num_choices == 4
    assert {p.index for p in pieces} == {0, 1, 2, 3}
    assert {p.prompt.text for p in pieces if p.index >= 2} == {"c"}
    assert engine.aborted == []
    assert [given.salt for given in engine.submitted] == ["salt"] * 2


def test_when_the_second_is_refused_the_first_is_aborted(engine):
    engine.open.clear()
    engine.queue_limit = 1

    async def submit():
        Generation(engine, Mailbox(), PROMPTS).submit("sql", [Sampling()] * 2, "")

    with pytest.raises(QueueFull):
        asyncio.run(submit())
    assert engine.aborted == [engine.submitted[0].id]
    engine.open.set()


def test_a_dead_engine_is_503(engine):
    def dead(*args, **kwargs):
        raise RuntimeError("at /srv/x")

    engine.submit, engine.alive = dead, False

    async def submit():
        Generation(engine, Mailbox(), PROMPTS).submit(None, [Sampling()] * 2, "")

    with pytest.raises(ApiError, match="The engine has stopped") as error:
        asyncio.run(submit())
    assert error.value.status == 503


def test_silence_is_an_empty_batch_and_leaving_aborts(engine):
    engine.open.clear()

    async def listen():
        silence = asyncio.Event()

        async def leave():
            await silence.wait()
            return {"type": "http.disconnect"}

        generation = Generation(engine, Mailbox(), PROMPTS)
        generation.submit("sql", [Sampling()] * 2, "")
        batches = []
        try:
            async for batch in generation.pieces(leave, 0.02):
                batches.append(batch)
                silence.set()
        except ClientGone:
            return batches
        return None

    batches = asyncio.run(listen())
    assert batches
    assert not any(batches)
    assert len(engine.aborted) == 2
    engine.open.set()


def test_output_after_the_loop_has_ended_is_dropped(engine):
    async def submit():
        generation = Generation(engine, Mailbox(), PROMPTS)
        return generation._receiver(PROMPTS[0], 0)

    on_output = asyncio.run(submit())
    on_output(OutputDelta("x", 0, "late", (1,)))


def test_pieces_of_a_whole_answer_wake_the_loop_with_the_last_one_of_a_choice(engine):
    async def listen() -> list[list[str]]:
        generation = Generation(engine, Mailbox(), PROMPTS[:1])
        generation.is_whole = True
        generation._running["x"] = 2
        on_output, seen = generation._receiver(PROMPTS[0], 0), []
        batches = generation.pieces(nobody_leaves, 10.0)
        for delta in (
            *(OutputDelta("x", 0, text, (1,)) for text in "ab"),
            OutputDelta("x", 0, "c", (1,), finish_reason=FinishReason.STOP),
            OutputDelta("x", 1, "d", (1,), finish_reason=FinishReason.ABORT),
        ):
            on_output(delta)
            await asyncio.sleep(0.01)
            waiting = generation._queue.qsize()
            batch = await anext(batches) if waiting else []
            seen.append([piece.delta.text for piece in batch])
        await batches.aclose()
        return seen

    assert asyncio.run(listen()) == [[], [], ["a", "b", "c"], ["d"]]


def plain(text, **fields):
    return OutputDelta("x", 0, text, (1,), **fields)


def test_a_sink_gets_what_comes_while_its_owner_waits(engine):
    """Not what ends a choice or brings scores, nor what comes behind that, so the order stays."""

    async def run() -> tuple[list[str], list[str]]:
        generation, poured, read = Generation(engine, Mailbox(), PROMPTS[:1]), [], []
        generation._running["x"] = 2
        idle = asyncio.Event()

        def joined(pieces: list[Piece]) -> str:
            return "".join(piece.delta.text for piece in pieces)

        def sink(pieces: list[Piece]) -> bool:
            if pieces[0].delta.text == "refused":
                return False
            poured.append(joined(pieces))
            return True

        async def reads() -> None:
            async for batch in generation.pieces(nobody_leaves, 10.0, sink):
                read.append(joined(batch))
                await idle.wait()  # busy with it

        def arrive(*deltas: OutputDelta) -> None:
            generation._queue.take([Piece(0, PROMPTS[0], delta) for delta in deltas])

        async def turns() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        arrive(plain("early"))
        reader = asyncio.create_task(reads())
        await turns()
        arrive(plain("busy"))
        idle.set()
        await turns()
        arrive(plain("a"), plain("b"))
        arrive(plain("c"), plain("d", finish_reason=FinishReason.STOP))
        arrive(plain("behind"))
        await turns()
        arrive(plain("scores", prompt_logprobs=(None,)))
        await turns()
        arrive(plain("refused"), plain("e"))
        await turns()
        arrive(plain("f"))
        arrive(plain("g", finish_reason=FinishReason.STOP))
        await reader
        arrive(plain("late"))
        return poured, read

    poured, read = asyncio.run(run())
    assert poured == ["ab", "f"]
    assert read == ["early", "busy", "cdbehind", "scores", "refusede", "g"]


def test_what_a_sink_raises_ends_the_pieces(engine):
    async def run() -> None:
        generation = Generation(engine, Mailbox(), PROMPTS[:1])
        generation._running["x"] = 1

        def sink(pieces: list[Piece]) -> bool:
            raise ZeroDivisionError

        on_output = generation._receiver(PROMPTS[0], 0)
        asyncio.get_running_loop().call_later(0.01, on_output, plain("a"))
        with pytest.raises(ZeroDivisionError):
            await anext(generation.pieces(nobody_leaves, 10.0, sink))
        assert engine.aborted == ["x"]

    asyncio.run(run())


def test_usage_counts_a_prompt_once_whatever_its_choices(engine):
    async def make():
        return Generation(engine, Mailbox(), PROMPTS)

    usage = usage_of(asyncio.run(make()))
    for index in range(2):
        delta = OutputDelta("x", index, "a", (1, 2), num_cached_tokens=1)
        usage.add(Piece(index, PROMPTS[0], delta))
    assert usage.as_json() == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_text_for_a_client_that_does_not_read_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(generation_room, "_MOST_WAITING", 10)

    async def run():
        generation = Generation(engine, Mailbox(), PROMPTS[:1])
        for _ in range(11):
            generation._queue.put_nowait(generation_room._Sign.SILENCE)
        told = generation._receiver(PROMPTS[0], 0)
        told(OutputDelta("fake-0", 0, "x", (1,)))
        assert not engine.aborted  # many pieces at once are no slow client
        generation.is_sending = True
        told(OutputDelta("fake-0", 0, "x", (1,)))
        assert engine.aborted == ["fake-0"]
        with pytest.raises(ApiError, match="reads too slowly") as slow:
            await generation._next(Silence(generation._loop, 1.0, lambda: None))
        assert slow.value.status == 408  # no fault of the server's

    asyncio.run(run())
