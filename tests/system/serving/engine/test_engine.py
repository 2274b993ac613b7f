"""The engine's contract, on tiny random checkpoints: what a request gets depends on it alone."""

import dataclasses
import random
import time

import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.engine_cases import (
    GREEDY,
    NUM_PAGES,
    RANKS,
    SCORED,
    SHAPES,
    HeldListener,
    Listener,
    answer,
    make_engine,
    mixed_requests,
    prompts_of,
    settle,
)
from support.waiting import wait_until

from lora_jax.adapters.registry import AdapterNotFound
from serving import FinishReason, QueueFull, RequestFailed, Sampling

# The promise of the whole: bits do not depend on the batch, so the compiler's code counts.
pytestmark = pytest.mark.as_shipped


@pytest.fixture(scope="module", params=["llama", pytest.param("mixtral", marks=pytest.mark.long)])
def any_engine(request, tmp_path_factory):
    if request.param == "llama":
        yield request.getfixturevalue("engine")
        return
    with make_engine(tmp_path_factory.mktemp("moe"), SHAPES["mixtral"], "bfloat16") as engine:
        yield engine
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0


def test_together_is_alone_with_arrivals_aborts_and_preemptions(any_engine):
    engine, requests = any_engine, mixed_requests()
    alone = [answer(engine.generate([p], name, s)[0]) for p, name, s in requests]
    before, rng = engine.stats().preemptions, random.Random(5)
    listeners, doomed, first = [], [], HeldListener()
    for place, (prompt, name, sampling) in enumerate(requests):
        if place % 3 == 0:
            listener = Listener()
            long = Sampling(max_tokens=50, temperature=1.0, ignore_eos=True)
            doomed.append((engine.submit(prompt, name, long, on_output=listener), listener))
        listeners.append(Listener() if place else first)
        engine.submit(prompt, name, sampling, on_output=listeners[-1])
        if place == len(requests) // 2:  # more than can run at once, however late they come
            first.go_on.set()
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.01)
        if doomed and rng.random() < 0.5:
            engine.abort(doomed.pop(rng.randrange(len(doomed)))[0])
    for request_id, listener in doomed:
        engine.abort(request_id)
        assert listener.wait().finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    for listener, want in zip(listeners, alone, strict=True):
        last = listener.wait()
        text = "".join(delta.text for delta in listener.deltas)
        logprobs = tuple(entry for delta in listener.deltas for entry in delta.logprobs)
        scored = [d.prompt_logprobs for d in listener.deltas if d.prompt_logprobs]
        got = listener.tokens(), text, logprobs, last.finish_reason, scored[0] if scored else None
        assert got == want
    assert engine.stats().preemptions > before
    settle(engine)


def test_base_rows_do_not_notice_adapters(any_engine):
    prompts = prompts_of(4, seed=2)
    alone = [answer(any_engine.generate([p], None, SCORED)[0]) for p in prompts]
    crowd = [*prompts, *prompts]
    names = [None, None, None, None, "a7", "a3", "a7", "a1"]
    mixed = any_engine.generate(crowd, names, SCORED)
    assert [answer(output) for output in mixed[:4]] == alone
    assert [answer(output) for output in mixed[4:]] != alone


@pytest.mark.parametrize("name", [None, "a0", "a7"])
def test_logprobs_are_those_of_a_merged_model_in_numpy(engine, folder, name):
    shape = SHAPES["llama"]
    tensors = tiny_checkpoint.write_model(folder / "again", shape)
    if name is not None:
        place = int(name[1:])
        deltas = tiny_checkpoint.write_adapter(folder / name, shape, RANKS[place], seed=place)
        for weight, delta in deltas.items():
            tensors[weight] = tensors[weight] + delta
    prompt = prompts_of(1, seed=3)[0]
    sampling = dataclasses.replace(SCORED, prompt_logprobs=0)
    (output,) = engine.generate([prompt], name, sampling)
    first = output.outputs[0]
    ids = [*prompt, *first.token_ids]
    logits = tiny_checkpoint.forward(tensors, shape, ids)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *first.logprobs]
    assert [entry.token_id for entry in entries] == ids[1:]
    want = logprobs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose([entry.logprob for entry in entries], want, atol=1e-4)
    greedy = logprobs[len(prompt) - 1 : -1].argmax(-1)
    np.testing.assert_array_equal(first.token_ids, greedy)


def test_the_seed_decides_and_nothing_else(engine):
    prompt = prompts_of(1, seed=4)[0]
    sampling = Sampling(max_tokens=20, temperature=1.5, seed=11, ignore_eos=True, n=3)
    (alone,) = engine.generate([prompt], "a2", sampling)
    texts = [choice.token_ids for choice in alone.outputs]
    assert len(set(texts)) == 3
    crowd = engine.generate([prompt, *prompts_of(6, seed=5)], ["a2", *["a5", None] * 3], sampling)
    assert [choice.token_ids for choice in crowd[0].outputs] == texts
    other = dataclasses.replace(sampling, seed=12)
    assert engine.generate([prompt], "a2", other)[0].outputs[0].token_ids != texts[0]
    unseeded = Sampling(max_tokens=20, temperature=1.5, ignore_eos=True)
    first, second = (engine.generate([prompt], "a2", unseeded)[0] for _ in range(2))
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_repeated_prompts_come_from_the_prefix_cache_of_the_same_weights(engine, folder):
    prompt = prompts_of(1, seed=12, low=39)[0]
    first = engine.generate([prompt], "a6", SCORED)[0]
    again = engine.generate([prompt], "a6", SCORED)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (len(prompt) - 1) // 4 * 4)
    assert answer(again) == answer(first)
    assert engine.generate([prompt], "a5", SCORED)[0].num_cached_tokens == 0
    engine.load_adapter("same-files", str(folder / "a6"))
    assert engine.generate([prompt], "same-files", SCORED)[0].num_cached_tokens > 0
    engine.unload_adapter("same-files")
    salted = Listener()
    engine.submit(prompt, "a6", SCORED, on_output=salted, cache_salt="tenant")
    assert salted.wait().num_cached_tokens == 0


def test_abort_frees_everything(engine):
    listeners = [HeldListener() for _ in range(20)]  # whose adapter comes first is not known
    long = Sampling(max_tokens=60, temperature=1.0, ignore_eos=True, n=2)
    prompts = prompts_of(20, seed=13)
    ids = [
        engine.submit(prompt, f"a{place % 8}", long, on_output=listener)
        for place, (prompt, listener) in enumerate(zip(prompts, listeners, strict=True))
    ]
    while not any(listener.deltas for listener in listeners):
        time.sleep(0.001)
    for request_id in [*ids, "unknown"]:
        engine.abort(request_id)
    for listener in listeners:
        listener.go_on.set()
    assert {listener.wait().finish_reason for listener in listeners} == {FinishReason.ABORT}
    settle(engine)
    for listener in listeners:
        last = [d for d in listener.deltas if d.finish_reason is not None]
        assert sorted(delta.index for delta in last) == [0, 1]
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert {"lora_gemm", "paged_attention", "rms_norm"} <= stats.implementations.keys()
    assert all(choice["implementation"] for choice in stats.implementations["lora_gemm"])


def test_bad_input_is_refused_and_the_next_request_succeeds(engine, folder):
    cases = [
        (lambda: engine.generate([[]]), ValueError, "The prompt has no tokens"),
        (lambda: engine.generate([[5] * 96]), ValueError, r"Input length \(96\) exceeds"),
        (lambda: engine.generate([[260]]), ValueError, r"must be in \[0, 259\], got 260"),
        (lambda: engine.generate([[-1]]), ValueError, r"must be in \[0, 259\], got -1"),
        (lambda: engine.generate("x", "nobody"), AdapterNotFound, "Known: a0"),
        (lambda: engine.generate("x", "../model"), AdapterNotFound, "does not exist"),
        (lambda: engine.rollout("sql", ["v1"]), ValueError, "versions must be a mapping"),
        (
            lambda: engine.generate("x", None, Sampling(logit_bias={300: 1.0})),
            ValueError,
            "logit_bias token id must be in",
        ),
        (
            lambda: engine.generate("x", None, Sampling(allowed_token_ids=[260])),
            ValueError,
            "allowed_token_ids token id must be in",
        ),
        (
            lambda: engine.generate("x", None, Sampling(bad_words=["z" * 64])),
            ValueError,
            "bad_words must have 1 to 16 tokens",
        ),
        (
            lambda: engine.generate("x", None, Sampling(min_tokens=2, allowed_token_ids=[2])),
            ValueError,
            "allowed_token_ids leave no first token",
        ),
        (lambda: engine.load_adapter("model", str(folder / "a0")), ValueError, "base model"),
        (lambda: engine.load_adapter("b", str(folder / "model")), Exception, "b|model"),
        (lambda: engine.unload_adapter("nobody"), KeyError, "nobody"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
        assert engine.generate(["x"], sampling=GREEDY)[0].outputs[0].token_ids
    assert engine.is_alive()


def test_a_full_queue_refuses_and_counts(engine):
    name = "vllm:admission_rejections_total"
    labels = {"model_name": "model", "reason": "queue_full"}
    before = engine.metrics.registry.get_sample_value(name, labels)
    listener, ids, refused = HeldListener(), [], None  # or they might end as fast as they come
    long = Sampling(max_tokens=50, temperature=1.0, n=100)
    while refused is None and len(ids) < 10:
        try:
            ids.append(engine.submit([5, 6], None, long, on_output=listener))
        except QueueFull as full:
            refused = full
    assert refused is not None
    assert refused.retry_after_s > 0
    assert len(ids) >= 3
    for request_id in ids:
        engine.abort(request_id)
    listener.go_on.set()
    settle(engine)
    assert engine.metrics.registry.get_sample_value(name, labels) == before + 1


def test_a_broken_callback_ends_its_own_request_only(engine):
    def broken(delta):
        raise RuntimeError("the caller's own trouble")

    listener = Listener()
    engine.submit([9, 8, 7], "a1", GREEDY, on_output=broken)
    engine.submit([9, 8, 7], "a1", GREEDY, on_output=listener)
    assert listener.wait().finish_reason is FinishReason.LENGTH
    settle(engine)
    assert engine.is_alive()


def test_a_scrape_tells_what_happened(engine, folder):
    tiny_checkpoint.write_adapter(folder / "bad", SHAPES["llama"], 2, seed=1, strength=1e30)
    engine.load_adapter("bad", str(folder / "bad"))
    with pytest.raises(RequestFailed, match="not finite"):
        engine.generate("hello", "bad", SCORED)
    engine.unload_adapter("bad")
    engine.generate("hello", "a1", SCORED)
    engine.load_adapter("leaving", str(folder / "a1"))
    pieces = engine.stream("hello", "leaving", dataclasses.replace(GREEDY, max_tokens=80))
    next(pieces)
    engine.unload_adapter("leaving")
    assert list(pieces)
    settle(engine)
    sample = engine.metrics.registry.get_sample_value
    labels = {"model_name": "model", "engine": "0"}
    # A step's tokens are counted when its callers have them.
    made = "vllm:generation_tokens_total"
    wait_until(lambda: sample(made, labels) == engine.stats().generation_tokens > 0)
    stats = engine.stats()
    assert sample("vllm:prompt_tokens_total", labels) == stats.prompt_tokens > 0
    assert sample("vllm:prefix_cache_queries_total", labels) == stats.prefix_queries > 0
    assert sample("vllm:cache_config_info", None) is None  # it has labels of its own
    assert sample("vllm:request_success_total", labels | {"finished_reason": "error"}) >= 1
    assert sample("lora_jax:adapter_requests_total", {"adapter": "a1"}) > 0
    assert sample("lora_jax:adapter_requests_total", {"adapter": "other"}) > 0
    assert sample("lora_jax:compilations_after_warmup") == 0
    # Idle adapters are still brought into free slots, so both counts may move between two looks.
    wait_until(
        lambda: sample("lora_jax:adapter_load_seconds_count") == engine.stats().adapter_swaps
    )
    assert stats.adapters_loaded == len(engine.adapters())

    def both_name_the_same():
        named = {i.name for i in engine.adapters() if i.resident}
        return set(engine.stats().resident_adapters) == named

    wait_until(both_name_the_same)


def test_who_gives_no_sampling_gets_the_generation_config_s(engine):
    assert engine.default_sampling() == Sampling(temperature=0.0, top_k=9, max_tokens=5)
    want = engine.generate("hello", "a3", engine.default_sampling())[0]
    assert answer(engine.generate("hello", "a3")[0]) == answer(want)
    assert "".join(piece.text for piece in engine.stream("hello", "a3")) == want.outputs[0].text


def test_info_says_what_is_served(engine):
    info, shape = engine.model_info, SHAPES["llama"]
    assert (info.name, info.model_type, info.dtype) == ("model", "llama", "float32")
    assert (info.vocab_size, info.max_model_len, info.kv_pages) == (shape.vocab, 96, NUM_PAGES)
    assert engine.tokenizer.decode(engine.tokenizer.encode("hello")) == "hello"
