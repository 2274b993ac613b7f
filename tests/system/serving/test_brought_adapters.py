"""Adapters with more than LoRA in one batch: PEFT's log-probabilities, and nobody else's bits."""

import asyncio

import numpy as np
import pytest
from support.cases import brought_cases
from support.cases.brought_cases import (
    FAMILIES,
    adapter_names,
    answers,
    expected,
    write_own_tokens,
)
from support.processes.http_server import client_of

from lora_jax.adapters.registry import AdapterRejected
from serving import AsyncEngine, Sampling
from serving.api.outputs import RequestOutput
from serving.http.app import create_app

TOLERANCE = 1e-3  # of log-probabilities in float32


FURTHER = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name != "qwen2"]
ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-gpu") for name in FAMILIES]


@pytest.fixture(scope="module", params=["qwen2", *FURTHER, *ON_A_GPU])
def case(request, tmp_path_factory):
    """A family, its engine, and what it answers to each adapter in one batch."""
    family = request.param
    with brought_cases.make_engine(tmp_path_factory.mktemp(family), family) as engine:
        prompts, wanted = expected(family)
        names = [None, *adapter_names(family)]
        asked = [(prompt, name) for name in names for prompt in prompts]
        yield family, engine, asked, answers(engine, asked), wanted


def test_log_probabilities_are_those_of_peft(case):
    _, engine, asked, together, wanted = case
    for (prompt, name), (got, _, _) in zip(asked, together, strict=True):
        want = wanted[name or "base"][0 if len(prompt) == 13 else 1]
        np.testing.assert_allclose(got, want, atol=TOLERANCE, err_msg=str(name))
    # The adapters do something, each something else.
    of_first = {name: tuple(each[0]) for (_, name), each in zip(asked, together, strict=True)}
    assert len(set(of_first.values())) == len(of_first)
    assert engine.stats().compilations_after_warmup == 0


def test_alone_is_bit_equal_to_in_a_batch(case):
    _, engine, asked, together, _ = case
    alone = [answers(engine, [one])[0] for one in asked]
    assert alone == together
    assert engine.stats().compilations_after_warmup == 0


def test_texts_have_the_tokens_of_the_adapter_s_own_tokenizer(case, tmp_path):
    family, engine, *_ = case
    if family == "qwen3_moe":
        pytest.skip("no adapter of trained tokens is committed for it")
    write_own_tokens(tmp_path / "own", family)
    engine.load_adapter("own", tmp_path / "own")
    text, plain = "a<call>b", engine.tokenizer.encode("a<call>b")
    ids = engine.tokenizer_of("own").encode(text)
    assert (ids.count(259), len(plain)) == (1, len(ids) + 5)
    call = Sampling(max_tokens=2, temperature=0.0, allowed_token_ids=[259], ignore_eos=True)
    by_text, by_ids, other = engine.generate([text, ids, text], ["own", "own", None], call)
    assert (by_text.prompt_token_ids, other.prompt_token_ids) == (tuple(ids), tuple(plain))
    assert by_text.outputs[0] == by_ids.outputs[0]
    assert (by_text.outputs[0].text, other.outputs[0].text) == ("<call><call>", "")
    assert "".join(piece.text for piece in engine.stream(text, "own", call)) == "<call><call>"
    message = [{"role": "user", "content": text}]
    (chat,) = engine.chat(message, "own", call)
    assert chat.prompt_token_ids.count(259) == 1
    with client_of(create_app(engine)) as client:
        for model, want in (("own", ids), (None, plain)):
            got = client.post("/tokenize", json={"model": model, "prompt": text}).json()
            assert got["tokens"] == want
            asked = {"model": model, "tokens": ids}
            back = client.post("/detokenize", json=asked).json()["prompt"]
            assert ("<call>" in back) == (model == "own")
        body = {"model": "own", "max_tokens": 2, "allowed_token_ids": [259], "ignore_eos": True}
        got = client.post("/v1/completions", json=body | {"prompt": text, "logprobs": 1}).json()
        assert got["choices"][0]["text"] == "<call><call>"
        assert got["choices"][0]["logprobs"]["tokens"] == ["<call>", "<call>"]
        got = client.post("/v1/chat/completions", json=body | {"messages": message}).json()
        assert got["choices"][0]["message"]["content"] == "<call><call>"
        assert got["usage"]["prompt_tokens"] == len(chat.prompt_token_ids)
        got = client.post("/v1/responses", json={"model": "own", "input": text}).json()
        assert got["usage"]["input_tokens"] == len(chat.prompt_token_ids)
    engine.unload_adapter("own")


def test_a_text_has_the_tokens_of_the_version_that_answers_it(case, tmp_path):
    """Without a session the tokens were those of one version, and the answer that of another."""
    family, engine, *_ = case
    if family == "qwen3_moe":
        pytest.skip("no adapter of trained tokens is committed for it")
    write_own_tokens(tmp_path / "own", family)
    write_own_tokens(tmp_path / "other", family)
    (tmp_path / "other" / "tokenizer.json").unlink()  # which spells no token of its own
    engine.load_adapter("tool@v1", tmp_path / "other")
    engine.load_adapter("tool@v2", tmp_path / "own")
    engine.rollout("tool", v1=50, v2=50)
    text, count = "a<call>b", 24
    call = Sampling(max_tokens=1, temperature=0.0, allowed_token_ids=[259], ignore_eos=True)
    outputs = engine.generate([text] * count, "tool", call)
    outputs += engine.chat([[{"role": "user", "content": text}]] * count, "tool", call)
    pieces = [next(iter(engine.stream(text, "tool", call))) for _ in range(count)]
    assert {piece.text for piece in pieces} <= {"<call>", ""}

    async def chats() -> list[RequestOutput]:
        made, message = AsyncEngine(engine), [{"role": "user", "content": text}]
        found = [made.chat(message, call, adapter="tool") for _ in range(count)]
        return [output for one in found async for output in one]

    outputs += [output for output in asyncio.run(chats()) if output.finished]
    assert {output.adapter_version for output in outputs} == {"v1", "v2"}
    for output in outputs:
        of_own = output.adapter_version == "v2"
        assert output.prompt_token_ids.count(259) == of_own, output.adapter_version
        assert output.outputs[0].text == ("<call>" if of_own else "")
    engine.rollouts.end("tool")
    for version in ("v1", "v2"):
        engine.unload_adapter(f"tool@{version}")


def test_a_tokenizer_that_does_not_fit_is_refused_by_the_token(case, tmp_path):
    family, engine, *_ = case
    if family == "qwen3_moe":
        pytest.skip("no adapter of trained tokens is committed for it")
    for number, words in ((260, "the base has 260 rows of tokens"), (9, "which is")):
        write_own_tokens(tmp_path / str(number), family, number)
        with pytest.raises(AdapterRejected, match=f"'<call>' has the id {number}.*{words}"):
            engine.load_adapter("own", tmp_path / str(number))
