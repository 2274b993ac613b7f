"""The bench of a host's cost counts what answers say; its device takes the time of its steps."""

import asyncio
import json
import time
import urllib.parse
from types import SimpleNamespace

import numpy as np
import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import serve_app

from bench.host_cost.__main__ import ReadyDevice
from bench.host_cost.callers import ask, body_of
from serving.http.app import create_app


@pytest.fixture(scope="module")
def port():
    with serve_app(create_app(FakeEngine())) as url:
        yield urllib.parse.urlsplit(url).port


def asked(port, body):
    async def run():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return [await ask(reader, writer, "/v1/completions", body) for _ in range(2)]
        finally:
            writer.close()

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_are_those_of_the_usage(port, stream):
    body = json.loads(body_of("completions", 0, 5, stream=stream))
    body |= {"model": "fake-base", "prompt": "x"}
    assert asked(port, json.dumps(body).encode()) == [5, 5]


def test_a_refused_request_is_told(port):
    with pytest.raises(RuntimeError, match="404"):
        asked(port, body_of("completions", 0, 5, stream=True))


def test_steps_follow_one_another():
    step = SimpleNamespace(run=None)
    parts = SimpleNamespace(runner=SimpleNamespace(_step=step))
    engine = SimpleNamespace(
        model_info=SimpleNamespace(vocab_size=1000),
        _loop=SimpleNamespace(_parts=parts),
    )
    device, operands = ReadyDevice(engine, 4, 0.02), SimpleNamespace(cache=1, state=2)
    began = time.perf_counter()
    steps = [step.run(operands, None, 4, lora=False)[2] for _ in range(2)]
    ids = np.asarray(steps[1].token_ids)
    assert time.perf_counter() - began >= 0.04
    assert device.num_steps == 2
    assert ids.min() >= 300
    assert ids.max() < 1000 - 64
