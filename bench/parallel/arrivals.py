"""Requests that arrive at random times at a server of OpenAI's API, whether it keeps up or not.

An open loop: times are drawn before (Poisson), and no request waits for another's answer. What the
generator itself was late by is a figure of its own.
"""

import asyncio
import dataclasses
import json
import time
from typing import Any

import numpy as np

WAIT_S = 120.0  # for an answer


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests a second for so many seconds, of equal lengths; the base and adapters are drawn."""

    rate: float
    seconds: float
    prompt: int  # tokens
    answer: int
    names: tuple[str, ...]
    vocab: int
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request; `at` is seconds from the start."""

    at: float
    name: str
    prompt: list[int]


@dataclasses.dataclass(frozen=True)
class Told:
    """Seconds from the start at which the events of an answer came; `due` is its arrival."""

    due: float
    sent: float
    events: list[float]
    tokens: int
    error: str | None = None


def arrivals(load: Load) -> list[Asked]:
    """Return the requests in their order; the same for every server."""
    rng = np.random.default_rng(load.seed)
    gaps = rng.exponential(1 / load.rate, int(2 * load.rate * load.seconds) + 32)
    times = np.cumsum(gaps)
    return [
        Asked(
            float(at),
            str(rng.choice(load.names)),
            rng.integers(4, load.vocab, load.prompt).tolist(),
        )
        for at in times[times < load.seconds]
    ]


def serve(port: int, load: Load) -> dict[str, Any]:
    """Send the requests at their times and return the figures.

    RuntimeError: a request failed, or had fewer tokens than it asked for.
    """
    told = asyncio.run(_send_all(port, arrivals(load), load))
    failed = [one.error or "too short" for one in told if one.error or one.tokens != load.answer]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(told)} requests failed: {failed[0]}")
    return figures(told, load)


def figures(told: list[Told], load: Load) -> dict[str, Any]:
    """Return a load's row: times in ms, rates in tokens or requests a second."""
    first = [1e3 * (one.events[0] - one.due) for one in told]
    gaps = [1e3 * gap for one in told for gap in np.diff(one.events)]
    mean = [1e3 * (one.events[-1] - one.events[0]) / max(1, one.tokens - 1) for one in told]
    last = max(one.events[-1] for one in told)
    late = max(one.sent - one.due for one in told)
    row: dict[str, Any] = {"rate": load.rate, "seconds": load.seconds, "requests": len(told)}
    row |= {"prompt_tokens": load.prompt, "answer_tokens": load.answer}
    for name, values in (("ttft", first), ("between_tokens", gaps), ("tpot", mean)):
        for percent in (50, 99):
            row[f"{name}_p{percent}_ms"] = round(float(np.percentile(values, percent)), 2)
    row["output_tokens_per_s"] = round(sum(one.tokens for one in told) / last, 1)
    row["last_answer_s"] = round(last, 2)
    row["events_a_request"] = round(float(np.mean([len(one.events) for one in told])), 1)
    row["generator_late_ms"] = round(1e3 * late, 2)
    return row


async def _send_all(port: int, asked: list[Asked], load: Load) -> list[Told]:
    begun = time.perf_counter()
    return list(await asyncio.gather(*(_send(port, one, load, begun) for one in asked)))


async def _send(port: int, one: Asked, load: Load, begun: float) -> Told:
    """Send a request when it is due; read its events as they come."""
    body = {"model": one.name, "prompt": one.prompt, "max_tokens": load.answer, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(text)}"
    await asyncio.sleep(begun + one.at - time.perf_counter())
    sent, events = time.perf_counter() - begun, []
    try:
        async with asyncio.timeout(WAIT_S):
            # HTTP 1.0: the answer comes without chunks around its lines
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            try:
                writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + text)
                tokens = await _read(reader, events, begun)
            finally:
                writer.close()
        return Told(one.at, sent, events, tokens)
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        return Told(one.at, sent, events, 0, f"{type(error).__name__}: {error}")


async def _read(reader: asyncio.StreamReader, events: list[float], begun: float) -> int:
    """Note when each event with text comes; return the tokens that the server counted."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise ValueError(f"{status!r} {(await reader.read(2000))[-400:]!r}")
    tokens = 0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter() - begun
        told = json.loads(line[6:])
        if told.get("error"):
            raise ValueError(str(told["error"]))
        if told["choices"]:
            events.append(now)
        if told.get("usage"):
            tokens = told["usage"]["completion_tokens"]
    return tokens
