"""Task heads over a real engine: an oracle's logits, alone as in company, and what is refused."""

import collections
import concurrent.futures
import json
import threading

import numpy as np
import pytest
from support.cases.engine_cases import GREEDY, Listener, prompts_of, settle
from support.cases.head_cases import write_head, write_headed_adapter
from support.cases.tiny_checkpoint import TinyShape, forward, write_adapter, write_model
from support.processes.http_server import client_of
from support.waiting import wait_until

from serving import Engine
from serving.engine.classification import HEAD_SAMPLING
from serving.http.app import create_app

SHAPE = TinyShape(max_positions=96)
# The rows of the LM head of these tokens are the weights of the heads: so `forward` is the oracle.
TOKENS = (70, 80, 90, 100)
HEADS = {"h0": (2, TOKENS), "h1": (4, TOKENS[:2]), "bare": (0, TOKENS[1:])}
BIAS = np.array([0.5, -0.5, 1.0, -1.0], np.float32)
# Calls of a head's request in these files, by thread: a fifth more than there are.
COUNTED = "/serving/", "/lora_jax/", "/prometheus_client/"
MOST_OF_CALLER, MOST_OF_ENGINE = 200, 390
SIZES = {
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "max_lora_rank": 8,
    "structured_outputs": False,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of a model and its adapters; the weights with each of them merged."""
    root = tmp_path_factory.mktemp("heads")
    tensors = write_model(root / "tiny", SHAPE)
    merged = {}
    for seed, (name, (rank, tokens)) in enumerate(HEADS.items()):
        weight, bias = tensors["lm_head.weight"][list(tokens)], BIAS[: len(tokens)]
        labels = [f"<{token}>" for token in tokens]
        if rank:
            given = (root / name, SHAPE, rank, seed, labels, weight, bias)
            deltas = write_headed_adapter(*given)
        else:
            write_head(root / name, labels, weight, bias, kind="multi_label")
            deltas = {}
        merged[name] = {key: value + deltas.get(key, 0) for key, value in tensors.items()}
    write_adapter(root / "plain", SHAPE, 3, 9)
    return root, merged


@pytest.fixture(scope="module")
def engine(made):
    root, _ = made
    adapters = {name: str(root / name) for name in (*HEADS, "plain")}
    with Engine(str(root / "tiny"), adapters=adapters, **SIZES) as engine:
        yield engine
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0


@pytest.fixture(scope="module")
def client(engine):
    with client_of(create_app(engine)) as client:
        yield client


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_the_oracle_s(engine, made, name):
    tokens = list(HEADS[name][1])
    for prompt in prompts_of(3, seed=5):
        (got,) = engine.classify([prompt], name)
        want = forward(made[1][name], SHAPE, prompt)[-1][tokens] + BIAS[: len(tokens)]
        np.testing.assert_allclose(got.outputs.logits, want, atol=2e-4)
        assert got.outputs.index == int(np.argmax(want))
        assert got.label == f"<{tokens[got.outputs.index]}>"
        if name == "bare":
            likely = tuple(f"<{t}>" for t, x in zip(tokens, want, strict=True) if x >= 0)
            assert got.outputs.labels == likely


def test_alone_is_together_with_text_of_others(engine):
    """Heads of three adapters between rows of the LM head, in chunks and from cached prefixes."""
    prompts = prompts_of(12, seed=6, low=20, high=60)
    names = [list(HEADS)[i % 3] for i in range(12)]
    alone = [engine.classify([p], n)[0].outputs for p, n in zip(prompts, names, strict=True)]
    texts = [engine.generate([p], "h0", GREEDY)[0].outputs[0] for p in prompts[:4]]
    before = engine.stats().steps
    listeners = [Listener() for _ in range(16)]
    for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        how = {"on_output": listeners[i], "by_head": True, "cache_salt": "other"}
        engine.submit(prompt, name, HEAD_SAMPLING, **how)
        if i < 4:
            engine.submit(prompt, "h0", GREEDY, on_output=listeners[12 + i])
    for listener, want in zip(listeners, alone, strict=False):
        last = listener.wait()
        assert last.head == want
        assert (str(last.finish_reason), last.token_ids, len(listener.deltas)) == ("stop", (), 1)
    for listener, want in zip(listeners[12:], texts, strict=True):
        listener.wait()
        assert listener.tokens() == want.token_ids
    assert engine.stats().steps > before


def test_one_prompt_is_one_forward_pass(engine):
    settle(engine)
    prompt = prompts_of(1, seed=7, low=30, high=31)[0]
    before = engine.stats().steps, engine.stats().generation_tokens
    engine.classify([prompt], "h0")
    settle(engine)
    assert engine.stats().steps == before[0] + 1
    assert engine.stats().generation_tokens == before[1]


def test_a_short_request_takes_few_calls_of_python(engine):
    """Between two steps their code has left the caches: a call takes a microsecond, not a tenth."""
    prompt, counts, told = prompts_of(1, seed=8, low=30, high=31)[0], collections.Counter(), set()
    for _ in range(2):
        engine.classify([prompt], "h0")
    settle(engine)
    wait_until(lambda: not engine.metrics.has_notes)

    def count(frame, event, _):
        file, thread = frame.f_code.co_filename, threading.get_ident()
        if event == "call" and thread not in told and any(part in file for part in COUNTED):
            counts[thread] += 1
            if frame.f_code.co_name == "on_output":  # what comes next the caller does not wait for
                told.add(thread)

    threading.setprofile_all_threads(count)
    try:
        engine.classify([prompt], "h0")
    finally:
        threading.setprofile_all_threads(None)
    caller = counts.pop(threading.get_ident())
    assert 0 < caller <= MOST_OF_CALLER, f"{caller} calls in the caller's thread"
    assert 0 < counts.total() <= MOST_OF_ENGINE, f"{counts.total()} calls in the engine's thread"


def test_who_has_no_head_is_told_so(engine):
    for adapter, message in ((None, "base model has no task head"), ("plain", "'plain' has no")):
        with pytest.raises(ValueError, match=message):
            engine.classify(["x"], adapter)
    with pytest.raises(ValueError, match="'h0' has a task head, and is served alone"):
        engine.classify(["x"], {"h0": 0.5, "plain": 0.5})
    with pytest.raises(ValueError, match="its sampling must be HEAD_SAMPLING"):
        engine.submit([5], "h0", GREEDY, on_output=print, by_head=True)
    with pytest.raises(KeyError):
        engine.classify(["x"], "nobody")


def test_classify_in_vllm_s_form(client, engine):
    prompts = prompts_of(3, seed=8)
    answer = client.post("/classify", json={"model": "h0", "input": prompts})
    assert answer.status_code == 200, answer.text
    got = answer.json()
    assert got["id"].startswith("classify-")
    assert (got["object"], got["model"]) == ("list", "h0")
    for i, (entry, want) in enumerate(
        zip(got["data"], engine.classify(prompts, "h0"), strict=True)
    ):
        assert entry == {
            "index": i,
            "label": want.label,
            "probs": list(want.probs),
            "num_classes": 4,
        }
    tokens = sum(map(len, prompts))
    assert got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"] == tokens
    assert got["usage"]["completion_tokens"] == 0
    body = {"model": "bare", "input": "text", "use_activation": False}
    (raw,) = client.post("/classify", json=body).json()["data"]
    (want,) = engine.classify(["text"], "bare")
    assert raw["probs"] == list(want.outputs.logits)
    assert tuple(raw.get("labels", (raw["label"],))) == want.outputs.labels


def test_chats_of_such_an_adapter_are_answered_by_its_label(client):
    messages = [{"role": "user", "content": "which?"}]
    (entry,) = client.post("/classify", json={"model": "h1", "messages": messages}).json()["data"]
    body = {"model": "h1", "messages": messages, "max_tokens": 3}
    chat = client.post("/v1/chat/completions", json=body).json()
    choice = chat["choices"][0]
    assert choice["message"]["content"] == entry["label"]
    assert (choice["finish_reason"], chat["usage"]["completion_tokens"]) == ("stop", 0)
    text = client.post("/v1/chat/completions", json=body | {"head": "lm", "ignore_eos": True})
    assert text.json()["usage"]["completion_tokens"] == 3
    completion = {"model": "h1", "prompt": "a", "head": "task"}
    label = client.post("/v1/completions", json=completion).json()["choices"][0]["text"]
    (entry,) = client.post("/classify", json={"model": "h1", "input": "a"}).json()["data"]
    assert label == entry["label"]


def test_responses_of_such_an_adapter_are_its_label(client):
    messages = [{"role": "user", "content": "which?"}]
    (entry,) = client.post("/classify", json={"model": "h1", "messages": messages}).json()["data"]
    body = {"model": "h1", "input": "which?"}
    answer = client.post("/v1/responses", json=body).json()
    (item,) = answer["output"]
    assert (answer["status"], item["type"]) == ("completed", "message")
    assert item["content"][0]["text"] == entry["label"]
    assert answer["usage"]["output_tokens"] == 0
    refused = client.post("/v1/responses", json=body | {"stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"head": "task", "stop": "x"}, "stop"),
        ({"head": "both"}, "head"),
        ({"head": "task", "model": "plain"}, "head"),
        ({"head": "task", "model": "tiny"}, "head"),
    ],
)
def test_what_a_head_cannot_give_is_refused_by_name(client, more, param):
    body = {"model": "h0", "messages": [{"role": "user", "content": "x"}]} | more
    answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "plain", "input": "x"}, 400),
        ({"input": "x"}, 400),
        ({"model": "nobody", "input": "x"}, 404),
        ({"model": "h0"}, 400),
        ({"model": "h0", "input": []}, 400),
        ({"model": "h0", "input": "x", "messages": []}, 400),
        ({"model": "h0", "input": [[9999]]}, 400),
        ({"model": "h0", "input": "x" * 97}, 400),
        ({"model": "h0", "input": "x", "truncate_prompt_tokens": 0}, 400),
        ({"adapters": [{"name": "h0", "weight": 0.5}], "input": "x"}, 400),
    ],
)
def test_bad_bodies(client, body, status):
    answer = client.post("/classify", json=body)
    assert answer.status_code == status, answer.text
    assert client.post("/classify", json={"model": "h0", "input": "x"}).status_code == 200


def test_cards_and_reports_name_the_labels(client):
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    want = {"kind": "class", "labels": ["<70>", "<80>"]}
    assert cards["h1"]["head"] == client.get("/v1/models/h1").json()["head"] == want
    assert "head" not in cards["plain"]
    assert client.get("/v1/adapters/h1").json()["head"] == {**want, "queries": 0}


def test_logits_that_are_no_numbers_end_one_request(engine, made, tmp_path):
    """A weight of 3e38 is finite in the file; its products are not."""
    root, _ = made
    write_head(tmp_path / "huge", ["a", "b"], np.full((2, SHAPE.hidden), 3e38))
    engine.load_adapter("huge", tmp_path / "huge")
    prompts = prompts_of(4, seed=9)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        bad = [pool.submit(engine.classify, [p], "huge") for p in prompts]
        good = [pool.submit(engine.classify, [p], "h0") for p in prompts]
    for one in bad:
        assert "not finite" in str(one.exception())
    want = [engine.classify([p], "h0")[0].probs for p in prompts]
    assert [one.result()[0].probs for one in good] == want
    engine.unload_adapter("huge")
    config = json.loads((root / "h0" / "task_head.json").read_text())
    write_head(tmp_path / "wide", [str(i) for i in range(65)], np.zeros((65, SHAPE.hidden)))
    assert len(config["labels"]) == 4
    with pytest.raises(ValueError, match="65 labels; the server takes 64"):
        engine.load_adapter("wide", tmp_path / "wide")
