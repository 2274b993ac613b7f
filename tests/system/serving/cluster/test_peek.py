"""The scan finds what json.loads finds, in a bounded time, whatever the body is."""

import json
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.cluster.peek import Peek, peek, sequences

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.text().filter(lambda t: t not in ("model", "max_tokens")), VALUES),
    st.text(min_size=1, max_size=20),
    st.integers(1, 10**6),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_model_and_tokens_are_found_behind_any_other_value(others, model, tokens, ascii_, indent):
    body = others | {"model": model, "max_tokens": tokens}
    found = peek(json.dumps(body, ensure_ascii=ascii_, indent=indent).encode())
    assert found == Peek(model, float(tokens))


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"", None),
        (b"[1]", None),
        (b'"model"', None),
        (b"{", None),
        (b'{"model"', None),
        (b'{"model":', None),
        (b'{"model": 5}', None),
        (b'{"model": "a', None),
        (b'{"model": "\\ud800x"}', "\ud800x"),
        (b'{"model": "\xff"}', None),
        (b'{"model": "' + b"a" * 300 + b'"}', None),
        (b'{"x": {"model": "inner"}, "model": "a"}', "a"),
        (b'{"x": [{"model": "inner"}]}', None),
        (b'{"x": "\\"model\\": \\"b\\"", "model": "a"}', "a"),
        (b'{"x": ]]]] , "model": "a"}', "a"),
    ],
)
def test_odd_bodies(body, model):
    assert peek(body).model == model


def hostile(size):
    yield b"[" * size
    yield b'{"a":' * (size // 5)
    yield b'{"p":"' + b'\\"' * (size // 2) + b'","model":"x"}'
    yield b'{"p":[' + b"1," * (size // 2) + b'1],"model":"x"}'
    yield b'{"p":[' + b"[]," * (size // 3) + b'1],"model":"x"}'
    yield b"{" + b'"a":1,' * (size // 6) + b'"model":"x"}'
    yield b"{" + b" " * size
    yield b'{"a":"' + b"\\" * size


def test_the_largest_bodies_cost_little():
    """json.loads of them takes 0.1 s to seconds, or a RecursionError."""
    for body in hostile(16 << 20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        least = 9.0
        for _ in range(3):
            begun = time.thread_time()
            peek(body)
            least = min(least, time.thread_time() - begun)
            if least < 0.5:
                break
        assert least < 0.5, body[:20]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 << 10, body[:20]  # kB; the bodies themselves are most of it


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 128}, 128),
        ({"prompt": ["a", "b]", '"c'], "n": 2}, 6),
        ({"n": 3, "prompt": [[1, 2], [3]]}, 6),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": [], "n": 2}, 2),
        ({"messages": [{"role": "user", "content": "n"}] * 5, "n": 4}, 4),
        ({"metadata": {"n": 7, "prompt": ["a", "b"]}, "n": 2}, 2),
        ([1], 1),
    ],
)
def test_sequences_are_prompts_times_choices(body, want):
    assert sequences(json.dumps(body).encode()) == want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b'{"n": 1, "n": 5, "n": 2}', 5),
        (b'{"\\u006e": 5}', 5),
        (b'{"n": "5"}', 1),
        (b'{"prompt": ["a", "b"', 2),
        (b'{"prompt": [' + b'"a",' * 300_000 + b'"a"]}', 20_000),
        (b"{" + b"[" * 100_000, 1),
        (b"", 1),
    ],
    ids=["twice", "escaped", "a text", "cut off", "many", "deep", "empty"],
)
def test_what_hides_sequences_gains_nothing(body, want):
    assert sequences(body) == want
