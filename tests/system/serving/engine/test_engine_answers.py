"""Answers of an engine: where they end, what they leave out, and how they are asked for."""

import dataclasses

import pytest
from support.cases.engine_cases import GREEDY, SCORED, answer, prompts_of, settle

from serving import FinishReason, Sampling
from serving.text.bad_words import BadWords


@pytest.fixture
def engine(real_engine):
    yield real_engine
    settle(real_engine)


def test_stop_strings_and_ids_end_the_text_before_themselves(engine):
    prompt = prompts_of(1, seed=9)[0]
    ascii_only = dict.fromkeys(range(36, 98), 20.0)  # printable: one character per token
    free = Sampling(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True, logit_bias=ascii_only)
    whole = engine.generate([prompt], None, free)[0].outputs[0]
    assert len(whole.text) == 30
    stop = whole.text[11:14]
    at = whole.text.index(stop)
    stopped = dataclasses.replace(free, stop=(stop,))
    got = engine.generate([prompt], None, stopped)[0].outputs[0]
    assert (got.text, got.finish_reason, got.stop_reason) == (
        whole.text[:at],
        FinishReason.STOP,
        stop,
    )
    assert got.token_ids == whole.token_ids[: at + 3]
    kept = dataclasses.replace(stopped, include_stop_str_in_output=True)
    assert engine.generate([prompt], None, kept)[0].outputs[0].text == whole.text[: at + 3]
    token = whole.token_ids[8]
    by_id = dataclasses.replace(free, stop_token_ids=(token,))
    got = engine.generate([prompt], None, by_id)[0].outputs[0]
    assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, token)
    assert got.text == whole.text[: whole.token_ids.index(token)]


def test_eos_ends_unless_held_back(engine):
    prompt = prompts_of(1, seed=10)[0]
    eager = Sampling(max_tokens=9, temperature=0.0, logit_bias={2: 100.0})
    got = engine.generate([prompt], None, eager)[0].outputs[0]
    assert (got.token_ids, got.text, got.finish_reason) == ((2,), "", FinishReason.STOP)
    ignoring = dataclasses.replace(eager, ignore_eos=True)
    got = engine.generate([prompt], None, ignoring)[0].outputs[0]
    assert (got.token_ids, got.finish_reason) == ((2,) * 9, FinishReason.LENGTH)
    patient = dataclasses.replace(eager, min_tokens=4)
    got = engine.generate([prompt], None, patient)[0].outputs[0]
    assert len(got.token_ids) == 5
    assert 2 not in got.token_ids[:4]
    assert got.token_ids[4] == 2
    banned = dataclasses.replace(GREEDY, logit_bias={2: -100.0})
    assert 2 not in engine.generate([prompt], None, banned)[0].outputs[0].token_ids


def test_a_prompt_can_be_scored_without_generating(engine):
    prompt = prompts_of(1, seed=11, low=39)[0]
    scoring = Sampling(max_tokens=0, prompt_logprobs=1, temperature=0.0)
    (output,) = engine.generate([prompt], "b", scoring)
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == prompt[1:]
    (longer,) = engine.generate([prompt], "b", dataclasses.replace(scoring, max_tokens=3))
    assert longer.prompt_logprobs == output.prompt_logprobs


def test_the_stream_gives_the_same_text_and_can_be_given_up(engine):
    want = engine.generate(["hello"], "b", GREEDY)[0].outputs[0].text
    assert "".join(piece.text for piece in engine.stream("hello", "b", GREEDY)) == want
    pieces = engine.stream("hello", "b", dataclasses.replace(GREEDY, max_tokens=80))
    assert next(pieces).token_ids
    pieces.close()
    settle(engine)


def test_lists_go_in_and_out_in_order(engine, capsys):
    names = ["a", None, "b"]
    outputs = engine.generate(["one", [50, 51], "three"], names, GREEDY, use_tqdm=True)
    assert [output.adapter for output in outputs] == names
    assert outputs[1].prompt_ids == (50, 51)
    assert "est. speed input: " in capsys.readouterr().err
    assert len(engine.generate("one prompt", sampling=GREEDY)) == 1
    assert len(engine.generate([50, 51], sampling=GREEDY)) == 1
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="2 prompts but 1 values of adapter"):
        engine.generate(["a", "b"], ["a"])


def test_barred_tokens_and_words_never_come_whatever_else_is_asked(engine):
    """Words of one and of several tokens, with penalties and log-probabilities, in one batch."""
    prompt, digits = prompts_of(1, seed=9)[0], tuple(range(100, 110))
    free = dataclasses.replace(SCORED, max_tokens=20)
    (plain,) = engine.generate([prompt], "b", free)
    ids = plain.outputs[0].token_ids
    words = [engine.tokenizer.token_text(ids[0]), engine.tokenizer.decode(ids[2:4])]
    words = [word for word in words if word.strip() and "\ufffd" not in word] or ["e"]
    found = BadWords(260)
    barred = {form for word in words for form in found.of(engine.tokenizer, (word,))}
    samplings = [
        free,
        dataclasses.replace(free, bad_words=words),
        dataclasses.replace(free, allowed_token_ids=digits, frequency_penalty=1.0),
        Sampling(max_tokens=20, seed=1, allowed_token_ids=digits, ignore_eos=True),
        Sampling(max_tokens=20, seed=2, temperature=1.5, bad_words=words, ignore_eos=True),
    ]
    together = engine.generate([prompt] * 5, "b", samplings)
    alone = [engine.generate([prompt], "b", sampling)[0] for sampling in samplings]
    assert [answer(one) for one in together] == [answer(one) for one in alone]
    assert answer(together[0]) == answer(plain)
    for output in together[2:4]:
        assert set(output.outputs[0].token_ids) <= set(digits)
    for output in (together[1], together[4]):
        got = output.outputs[0].token_ids
        runs = {got[i : i + len(form)] for form in barred for i in range(len(got))}
        assert not runs & barred


def test_calls_as_vllm_has_them(engine):
    want = answer(engine.generate(["hello"], "b", GREEDY)[0])
    base = answer(engine.generate(["hello"], None, GREEDY)[0])
    assert answer(engine.generate(["hello"], GREEDY)[0]) == base
    (output,) = engine.generate({"prompt": "hello"}, sampling_params=GREEDY, lora_request="b")
    assert answer(output) == want
    assert output.prompt == "hello"
    ids = {"prompt_token_ids": list(output.prompt_ids)}
    (again,) = engine.generate([ids], "b", GREEDY)
    assert answer(again) == want
    assert again.prompt is None
    assert "".join(piece.text for piece in engine.stream("hello", GREEDY)) == base[1]
    scored = engine.generate("hello", dataclasses.replace(GREEDY, logprobs=0))[0].outputs[0]
    assert scored.cumulative_logprob == sum(entry.logprob for entry in scored.logprobs) < 0
    with pytest.raises(TypeError, match="sampling is given twice"):
        engine.generate("hello", GREEDY, GREEDY)
