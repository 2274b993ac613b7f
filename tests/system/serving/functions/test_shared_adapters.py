"""Isolation "server" with one process for all adapters: an engine's answers, and kill -9."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes.server_process import ROOT
from support.waiting import wait_until

from serving import Engine, Sampling
from serving.functions import Agent, DeviceFull, FunctionDied, tenants
from serving.functions.callers import token_of
from serving.functions.messages import http_fields
from serving.http.access.keys import Caller
from serving.http.settings import HttpSettings

MODEL = ROOT / "assets" / "tiny-moe"
SIZES = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8}
SIZES |= {"structured_outputs": False, "max_esft_adapters": 0, "max_lora_rank": 16}
SAMPLING = Sampling(temperature=0, max_tokens=12, logprobs=1)
PROMPTS = ["The court", "原告"]
NAMES = "law", "summary"


def answers(outputs) -> list:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text) for o in outputs]


def until_answered(function):
    """Return the answers of a function whose process may have ended a moment ago."""
    for _ in range(5):
        try:
            return answers(function.generate(PROMPTS, SAMPLING))
        except FunctionDied:  # the call came before the death was noticed
            continue
    raise AssertionError("no answer")


@pytest.fixture(scope="module")
def coupled():
    """Answers of one engine with both adapters, and of the base: tokens and bits."""
    adapters = {name: MODEL / "adapters" / name for name in NAMES}
    with Engine(MODEL, adapters, max_loras=2, **SIZES) as engine:
        return {name: answers(engine.generate(PROMPTS, name, SAMPLING)) for name in (*NAMES, None)}


@pytest.fixture(scope="module")
def agent():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tenants.DEFAULTS, "wait_s", 5.0)  # a busy machine is slow
        options = {"isolation": "server", "tenant_processes": "one", "max_tenants": 2}
        settings = http_fields(HttpSettings(served_names=("base",)))
        http = {"settings": settings, "budgets_folder": None}
        with Agent(MODEL, http=http, **options, **SIZES) as made:
            for name in NAMES:
                made.function(MODEL / "adapters" / name)
            made.function(name="base")
            yield made


def test_answers_are_those_of_one_engine_with_the_adapters_in_it(agent, coupled):
    functions = agent.functions
    with ThreadPoolExecutor() as pool:  # rows of all in one batch
        names = [*NAMES, "base"] * 2
        answer = lambda name: answers(functions[name].generate(PROMPTS, SAMPLING))  # noqa: E731
        want = coupled | {"base": coupled[None]}
        assert list(pool.map(answer, names)) == [want[name] for name in names]
    assert functions["law"].pid == functions["summary"].pid != agent.engine.pid
    with pytest.raises(DeviceFull, match="All 2 places of the process of all adapters"):
        agent.function(MODEL / "adapters" / "translation")


def test_the_adapters_are_in_their_process_alone(agent):
    """The engine is in a jail that does not have their files, and the process has no backbone."""
    engine = Path(f"/proc/{agent.engine.pid}/maps").read_text()
    other = Path(f"/proc/{agent.functions['law'].pid}/maps").read_text()
    assert "lora_jax_pages" in engine
    assert "lora_jax_pages" not in other


def test_a_killed_process_ends_no_request_of_the_base_and_comes_back(agent, coupled):
    law, base = agent.functions["law"], agent.functions["base"]
    killed, engine = law.pid, agent.engine.pid
    streamed = base.stream("The court", SAMPLING)
    os.kill(killed, signal.SIGSTOP)
    hanging = law.stream("The court", SAMPLING)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(FunctionDied, match="'law' ended during the call"):
        list(hanging)
    assert "".join(streamed) == coupled[None][0][2]
    for name in NAMES:
        assert until_answered(agent.functions[name]) == coupled[name]
    assert (agent.engine.pid, law.pid != killed) == (engine, True)


def asked_over_http(function) -> str:
    """Return the answer of the function's routes to a prompt, which does not pass the agent."""
    body = json.dumps({"model": function.name, "prompt": "The court", "max_tokens": 2}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: function\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {token_of(Caller())}\r\nContent-Type: application/json\r\n"
    function.warm()
    connection = function.connect()
    assert connection is not None
    with connection:
        connection.settimeout(60)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()


def test_a_process_that_hangs_is_found_by_requests_over_http(agent):
    """Else each of them would fail until somebody ended it."""
    law, hangs = agent.functions["law"], agent.functions["law"].pid
    assert asked_over_http(law).startswith("HTTP/1.1 200")
    os.kill(hangs, signal.SIGSTOP)
    assert asked_over_http(law).startswith("HTTP/1.1 503")
    wait_until(lambda: law.pid != hangs)
    assert asked_over_http(law).startswith("HTTP/1.1 200")


@pytest.mark.long
def test_a_process_that_hangs_is_ended_and_started_again(agent, coupled):
    law, killed = agent.functions["law"], agent.functions["law"].pid
    os.kill(killed, signal.SIGSTOP)
    with pytest.raises(FunctionDied):
        law.generate(PROMPTS, SAMPLING)
    assert until_answered(law) == coupled["law"]
    assert law.pid != killed


def test_a_function_that_goes_makes_room_for_another_one(agent, coupled):
    agent.functions["summary"].close()
    wait_until(lambda: len(agent._tenants._shared._taken) < 2)
    translation = agent.function(MODEL / "adapters" / "translation")
    assert translation.generate("The court", SAMPLING)
    translation.close()
    assert until_answered(agent.function(MODEL / "adapters" / "summary")) == coupled["summary"]
