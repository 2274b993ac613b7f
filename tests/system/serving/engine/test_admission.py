"""Requests that cannot be served are refused before they enter the engine, and counted."""

import types

import pytest
from support.cases.metrics_cases import make, scrape, value

from lora_jax.adapters.registry import AdapterNotFound
from serving.api.request import EngineDead, QueueFull, Request
from serving.api.sampling import Sampling
from serving.api.structured_outputs import StructuredOutputs
from serving.engine.admission import Admission
from serving.text.structured.checker import GrammarRefused
from serving.text.structured.grammars import Grammars

ENTRY = types.SimpleNamespace(name="sql@v2", digest="d")


class Loop:
    """Raises what it is told to, or keeps the request."""

    def __init__(self):
        self.error, self.requests, self.is_this_thread = None, [], False

    def submit(self, request, entry, make_live):
        if self.error is not None:
            raise self.error
        self.requests.append((request, entry))


def resolve(adapter, named):
    if adapter == "nobody":
        raise AdapterNotFound(adapter, ())
    return named(adapter)


@pytest.fixture
def parts():
    return types.SimpleNamespace(
        loop=Loop(),
        tokenizers=types.SimpleNamespace(of=lambda entry: None),
        images=None,
        metrics=make(),
        grammars=Grammars(None, why_none="structured_outputs are off."),
        compositions=types.SimpleNamespace(resolve=resolve),
        model_info=types.SimpleNamespace(vocab_size=100, end_token_ids=(0,)),
        primary=None,
        registry=types.SimpleNamespace(handed_in=lambda entry: None),
        config=types.SimpleNamespace(adapter_wait_s=3.0),
    )


def check(parts, prompt_ids=(1, 2), adapter=None, sampling=None, entry=None):
    admission = Admission(parts, max_logprobs=5)
    return admission.check(prompt_ids, adapter, sampling or Sampling(), entry, lambda name: ENTRY)


def test_a_request_waits_for_host_memory_but_not_in_the_loops_thread(parts):
    assert Admission(parts, 5).room("sql") == {"wait_s": 3.0, "lends": True}
    assert Admission(parts, 5).room({"sql": 0.5}) == {"wait_s": 3.0, "lends": False}
    parts.loop.is_this_thread = True
    assert Admission(parts, 5).room("sql")["wait_s"] == 0.0


def rejected(parts, reason):
    name = "vllm:admission_rejections"
    return value(scrape(parts.metrics), name, f"{name}_total", reason=reason)


def test_a_name_becomes_the_entry_that_it_stands_for(parts):
    assert check(parts) == (None, None)
    assert check(parts, adapter="sql") == ("sql@v2", ENTRY)
    given = types.SimpleNamespace(name="sql@v1")
    assert check(parts, adapter="sql", entry=given) == ("sql", given)
    assert check(parts, adapter={"sql": 0.5}) == ("sql@v2", ENTRY)


@pytest.mark.parametrize(
    ("given", "error", "message", "reason"),
    [
        ({"prompt_ids": (1, 100)}, ValueError, r"in \[0, 99\], got 100", "invalid"),
        ({"prompt_ids": (-1,)}, ValueError, r"in \[0, 99\], got -1", "invalid"),
        ({"sampling": Sampling(logprobs=6)}, ValueError, "logprobs must be at most 5", "invalid"),
        (
            {"sampling": Sampling(prompt_logprobs=6)},
            ValueError,
            "prompt_logprobs must be at most 5",
            "invalid",
        ),
        ({"sampling": Sampling(logit_bias={100: 1.0})}, ValueError, "logit_bias", "invalid"),
        ({"adapter": "nobody"}, AdapterNotFound, "nobody", "adapter_not_found"),
    ],
)
def test_what_is_impossible_is_refused_and_counted(parts, given, error, message, reason):
    with pytest.raises(error, match=message):
        check(parts, **given)
    assert rejected(parts, reason) == 1
    check(parts)
    assert rejected(parts, reason) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("full", 1.0), "queue_full"),
        (ValueError("too long"), "invalid"),
        (EngineDead("dead"), "engine_dead"),
    ],
)
def test_a_refusal_of_the_loop_is_counted_by_its_reason(parts, error, reason):
    request = Request("r", (1,), Sampling(), None, "", lambda delta: None, 0.0, 0.0)
    admission, parts.loop.error = Admission(parts, 5), error
    with pytest.raises(type(error)):
        admission.queue(request, None)
    assert rejected(parts, reason) == 1
    parts.loop.error = None
    admission.queue(request, ENTRY)
    assert parts.loop.requests == [(request, ENTRY)]


def test_a_structure_that_is_refused_is_counted_too(parts):
    bound = Sampling(structured_outputs=StructuredOutputs(regex="a"))
    request = Request("r", (1,), bound, None, "", lambda delta: None, 0.0, 0.0)
    with pytest.raises(GrammarRefused, match="are off"):
        Admission(parts, 5).queue(request, None)
    assert rejected(parts, "invalid") == 1
    assert not parts.loop.requests


def test_an_engine_of_one_merged_adapter_takes_its_requests_as_rows_of_the_base(parts):
    parts.primary = "d"
    assert check(parts, adapter="sql") == ("sql@v2", None)
    assert check(parts, adapter="sql@v2", entry=ENTRY) == ("sql@v2", None)
    with pytest.raises(ValueError, match="serves it alone"):
        check(parts)
    parts.primary = "another"
    with pytest.raises(ValueError, match="as it was at the start"):
        check(parts, adapter="sql")
