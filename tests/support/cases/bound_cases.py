"""Requests whose answers a grammar binds, beside others, and steps that wait for masks."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from support.cases.grammar_cases import drawn_schema
from support.doubles.host_board import patience

from serving import RequestFailed, Sampling
from serving.text.structured.row_masks import RowMasks

NAMES = [None, "intent", "law", "token-law"]
TEXTS = ["Answer: ", "导航去", "the law of ", "{", "x"]
FREE = [
    Sampling(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True),
    Sampling(max_tokens=24, temperature=1.0, seed=4, top_p=0.9, logprobs=0),
    Sampling(max_tokens=16, temperature=0.8, seed=5, presence_penalty=0.5, min_tokens=4),
]


def answer(output):
    return [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs]


def bound(seed, **fields):
    warm = {"temperature": (0.0, 0.9, 1.3)[seed % 3], "seed": seed, "top_p": (1.0, 0.8)[seed % 2]}
    return Sampling(**{"max_tokens": 300, **warm, **fields})


def check(schema, output):
    """Every choice that came to its end is valid, and most did."""
    ended = [choice for choice in output.outputs if choice.finish_reason == "stop"]
    for choice in ended:
        jsonschema.validate(
            json.loads(choice.text),
            schema,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
    return len(ended)


def meet_a_driver_that_waits(engine, users, monkeypatch):
    """Have another engine start that keeps what a read needs until no step runs, many times."""
    runner, driver, sent = engine._loop._parts.runner, threading.Lock(), []
    dispatch, read = runner.dispatch, runner.read

    def noted(*given):
        sent.append(dispatch(*given))
        return sent[-1]

    def read_by_driver(step):
        with driver:
            return read(step)

    def idle():
        while not sent[-1].sampled.token_ids.is_ready():
            time.sleep(0.0005)

    monkeypatch.setattr(runner, "dispatch", noted)
    monkeypatch.setattr(runner, "read", read_by_driver)
    outputs = {"regex": "[0-9]{200}"}
    sampling = bound(1, structured_outputs=outputs, max_tokens=150)
    with patience(30), ThreadPoolExecutor(1) as pool, users.use():
        want = answer(engine.generate("x", sampling=sampling)[0])
        assert all(step.waits for step in sent)
        again = pool.submit(engine.generate, "x", sampling=sampling)
        while not again.done():
            with users.use():
                num_sent = len(sent)
                for _ in range(3):
                    with driver:
                        idle()
                assert not any(step.waits for step in sent[num_sent + 1 :])
            time.sleep(0.01)
        assert answer(again.result()[0]) == want
    monkeypatch.setattr(runner, "dispatch", dispatch)
    monkeypatch.setattr(runner, "read", read)


def lose_masks(engine, monkeypatch):
    """Have masks come too late; return the answers of free rows, which lose nothing by that."""
    work = RowMasks._fill

    def late(masks, *given):
        time.sleep(0.5)
        work(masks, *given)

    monkeypatch.setattr(RowMasks, "_fill", late)
    with patience(0.1), ThreadPoolExecutor(1) as pool:
        free = pool.submit(engine.generate, ["x"] * 3, NAMES[1:], FREE)
        outputs = {"json": drawn_schema(0)}
        with pytest.raises(RequestFailed, match="masks came more than 20 s late") as lost:
            engine.generate(["x"] * 2, sampling=bound(0, structured_outputs=outputs))
        assert lost.value.retryable
        return [answer(output) for output in free.result()]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2]}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("play", "stop")
]


def check_call(call):
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
    assert call["id"]
    assert call["type"] == "function"
    return call["function"]["name"]
