"""Answers have the bits that they have without speculation, whatever rides in a step."""

import dataclasses
import json
import threading
from types import SimpleNamespace

import pytest
from support.cases.engine_cases import answer, prompts_of, settle
from support.cases.grammar_cases import MODEL
from support.doubles.paying_drafts import num_drafts, send_all_drafts

from serving import Engine, Sampling

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
GREEDY = Sampling(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True)
KINDS = [
    GREEDY,
    Sampling(max_tokens=30, temperature=0.6, seed=3, top_k=4, logprobs=0, ignore_eos=True),
    Sampling(max_tokens=25, temperature=0.3, seed=4, top_p=0.9, frequency_penalty=-0.5, n=2),
    Sampling(max_tokens=20, temperature=0.0, prompt_logprobs=1, repetition_penalty=1.05),
    Sampling(max_tokens=21, temperature=0.5, seed=5, logit_bias={70: 4.0}, bad_words=["a"]),
    dataclasses.replace(GREEDY, min_tokens=9, ignore_eos=False, stop=["e", "\n"]),
    dataclasses.replace(GREEDY, stop_token_ids=list(range(40, 80)), logprobs=None),
    dataclasses.replace(GREEDY, allowed_token_ids=[70, 71, 72], temperature=0.9, seed=6),
]


def speculating(*args, paying=True, **fields):
    engine = Engine(*args, speculative_config=NGRAM, **fields)
    if paying:
        send_all_drafts(engine)
    return engine


@pytest.fixture(scope="module")
def engine(real_lora_dir):
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_loras": 2, "block_size": 4}
    model = str(real_lora_dir.parent / "tiny")
    adapters = {name: real_lora_dir / name for name in ("a", "b")}
    with speculating(model, adapters, structured_outputs=False, **fields) as made:
        yield made
        settle(made)
        assert made.stats().compilations_after_warmup == 0


@pytest.fixture(scope="module")
def plain(real_engine, real_lora_dir):
    """The engine that others share, without speculation."""
    for name in ("a", "b"):
        real_engine.load_adapter(f"plain-{name}", real_lora_dir / name)
    yield real_engine
    for name in ("a", "b"):
        real_engine.unload_adapter(f"plain-{name}")


NAMES = [None, "a", "b", {"a": 0.7, "b": -0.4}]


def of_plain(name):
    if isinstance(name, dict):
        return {f"plain-{part}": weight for part, weight in name.items()}
    return name and f"plain-{name}"


def test_answers_have_the_bits_of_an_engine_without_speculation(engine, plain):
    """Greedy and drawn, over adapters and a sum, alone and together."""
    prompts = [prompt * 2 for prompt in prompts_of(16, seed=3, low=3, high=9)]
    names = [NAMES[i % 4] for i in range(16)]
    samplings = [KINDS[i % 8] for i in range(16)]
    want = plain.generate(prompts, [of_plain(name) for name in names], samplings)
    got = engine.generate(prompts, names, samplings)
    assert [everything(one) for one in got] == [everything(one) for one in want]
    drafts, tokens, accepted = num_drafts(engine)
    assert drafts <= tokens
    assert 0 < accepted < tokens
    for i in (0, 1, 2, 5):
        (alone,) = engine.generate([prompts[i]], names[i], samplings[i])
        assert everything(alone) == everything(want[i])
    assert num_drafts(engine)[2] > accepted


def everything(output):
    choices = [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs]
    return choices, output.prompt_logprobs


def test_a_stream_ends_in_the_middle_of_a_draft(engine, plain):
    """Stop strings are met after the scheduler has taken in the tokens behind them."""
    prompt = prompts_of(1, seed=8)[0]
    long = dataclasses.replace(GREEDY, max_tokens=60)
    text = plain.generate([prompt], None, long)[0].outputs[0].text
    for end in sorted({text[i : i + 3] for i in range(5, 40, 4)} - {""})[:6]:
        sampling = dataclasses.replace(long, stop=[end])
        (want,) = plain.generate([prompt], None, sampling)
        assert "".join(piece.text for piece in engine.stream(prompt, None, sampling)) == (
            want.outputs[0].text
        )
        assert answer(engine.generate([prompt], None, sampling)[0]) == answer(want)


def test_a_lora_server_is_refused_by_name():
    with pytest.raises(ValueError, match="speculative_config is for engines that compute all"):
        Engine(str(MODEL), lora_server=SimpleNamespace(holds_all=False), speculative_config=NGRAM)


def test_aborted_requests_leave_nothing(engine):
    seen, count = threading.Event(), 0

    def on_output(delta):
        nonlocal count
        count += len(delta.token_ids)
        if count > 9:
            seen.set()

    long = dataclasses.replace(GREEDY, max_tokens=100, logprobs=None)
    request = engine.submit([5, 6, 7] * 4, "a", long, on_output=on_output)
    assert seen.wait(120)
    engine.abort(request)
    settle(engine)


ADAPTERS = {
    **{
        name: MODEL / "adapters" / name
        for name in ("intent", "law", "summary", "tools", "translation")
    },
    **{name: MODEL / "esft" / name for name in ("token-law", "gate-law", "token-intent")},
}


@pytest.mark.long
def test_500_requests_over_8_adapters_greedy_and_drawn():
    """The shipped model, its LoRA and ESFT adapters; grammars and preemptions among them."""
    names = [None, *ADAPTERS]
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 256}
    fields |= {"block_size": 8, "kv_cache_memory_bytes": 400 << 10}
    examples = json.loads((MODEL / "examples.json").read_text())["adapters"]
    texts = [text[:60] for text in examples.values()] + ["law of the law of ", "a b c a b c a b"]
    prompts = [texts[i % len(texts)] for i in range(500)]
    bound = Sampling(max_tokens=60, temperature=0.9, structured_outputs={"regex": "([ab]c)+[.]"})
    kinds = [*KINDS, bound]
    samplings = [
        dataclasses.replace(kinds[i % len(kinds)], seed=i, bad_words=()) for i in range(500)
    ]
    chosen = [names[i % len(names)] for i in range(500)]
    answers = []
    for make, more in ((Engine, {}), (speculating, {}), (speculating, {"paying": False})):
        with make(str(MODEL), ADAPTERS, **fields, **more) as engine:
            answers.append([everything(o) for o in engine.generate(prompts, chosen, samplings)])
            settle(engine)
            assert engine.stats().compilations_after_warmup == 0
            assert make is Engine or num_drafts(engine)[2] > 0 or "paying" in more
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
