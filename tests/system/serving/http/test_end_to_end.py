"""HTTP over a real engine: the oracle's text, alone as in company, base and adapters mixed."""

import concurrent.futures
import json

import httpx
import numpy as np
import pytest
from support.cases.bad_adapters import write_bad_esft
from support.cases.tiny_checkpoint import SPECIAL, TinyShape, forward, write_adapter
from support.cases.tiny_esft import write_esft_adapter

PROMPTS = ["hello", "a b c", "once upon a time there was", "x", "0123456789" * 3]
MODELS = ["tiny", "a", "b", "c"]


def complete(client: httpx.Client, **body) -> dict:
    answer = client.post("/v1/completions", json={"max_tokens": 8, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", ["tiny", "a", "b"])
def test_greedy_tokens_are_those_of_merged_weights(real_client, oracle, model):
    """The oracle adds the adapter's delta to the weights and computes in float64."""
    shape, tensors, deltas = oracle
    weights = tensors | {
        name: tensors[name] + delta for name, delta in deltas.get(model, {}).items()
    }
    prompt = [1, 100, 101, 102, 103, 104]
    answer = complete(
        real_client, model=model, prompt=prompt, return_token_ids=True, ignore_eos=True
    )
    ids = list(prompt)
    for token in answer["choices"][0]["token_ids"]:
        logits = forward(weights, shape, ids)[-1]
        assert logits[token] >= logits.max() - 1e-3
        ids.append(token)


def test_echoed_logprobs_are_the_oracle_s(real_client, oracle):
    shape, tensors, deltas = oracle
    weights = tensors | {name: tensors[name] + delta for name, delta in deltas["b"].items()}
    prompt = [1, 50, 60, 70, 80, 90, 200]
    body = {"model": "b", "prompt": [prompt], "max_tokens": 1, "echo": True, "logprobs": 1}
    got = complete(real_client, **body)["choices"][0]["logprobs"]["token_logprobs"]
    logits = forward(weights, shape, prompt)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = [logprobs[i, token] for i, token in enumerate(prompt[1:])]
    assert got[0] is None
    np.testing.assert_allclose(got[1:-1], want, atol=2e-4)
    scored = complete(real_client, **body | {"max_tokens": 0})["choices"][0]
    assert scored["logprobs"]["token_logprobs"] == got[:-1]
    assert scored["finish_reason"] == "length"


def test_everything_at_once_equals_alone(real_client):
    """Base and more adapters than slots, greedy and sampled, all at the same time."""
    cases = [
        {"model": model, "prompt": prompt, "temperature": t, "seed": 3, "logprobs": 1}
        for model in MODELS
        for prompt in PROMPTS
        for t in (0, 1.0)
    ]

    def run(case: dict) -> list:
        return complete(real_client, **case)["choices"]

    alone = [run(case) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(run, cases))
    assert together == alone
    texts = {json.dumps(a) for a in alone}
    assert len(texts) > len(cases) * 3 // 4


def test_streams_in_company_equal_whole_answers(real_client):
    def stream(model: str) -> str:
        body = {"model": model, "prompt": "hello", "max_tokens": 20, "temperature": 0}
        text = ""
        with real_client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
        return text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(stream, MODELS * 2))
    want = [
        complete(real_client, model=m, prompt="hello", max_tokens=20)["choices"][0]["text"]
        for m in MODELS
    ]
    assert got == want * 2


def test_chat_uses_the_model_s_template(real_client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    chat = real_client.post("/v1/chat/completions", json=body | {"model": "a"}).json()
    tokens = real_client.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
    plain = complete(real_client, model="a", prompt=tokens, max_tokens=5)
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len(tokens)


def test_tokens_and_text_go_both_ways(real_client):
    text = "héllo\n 世界"
    body = {"prompt": text, "add_special_tokens": False}
    answer = real_client.post("/tokenize", json=body).json()
    assert answer["count"] == len(text.encode())
    assert len(answer["token_strs"]) == answer["count"]
    back = real_client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_stop_strings_seeds_and_choices(real_client):
    body = {"prompt": "hello", "temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 12}
    one, two = (complete(real_client, **body)["choices"] for _ in range(2))
    assert one == two
    assert len({c["text"] for c in one}) == 3
    text = complete(real_client, prompt="hello", max_tokens=12, ignore_eos=True)["choices"][0]
    stop = text["text"][4:6]
    cut = complete(real_client, prompt="hello", max_tokens=12, ignore_eos=True, stop=[stop])
    choice = cut["choices"][0]
    assert choice["text"] == text["text"][: text["text"].index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_report_of_a_real_adapter(real_client):
    report = real_client.get("/v1/adapters/b").json()
    assert report["modules"]["q_proj"]["ranks"] == [2]
    assert report["modules"]["q_proj"]["scalings"] == [2.0]
    assert "experts.gate_proj" in report["modules"]
    assert set(report["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert len(report["digest"]) == 64


def test_reload_under_the_same_name_changes_the_text_at_once(real_client, real_lora_dir):
    """Whatever the prefix cache holds belongs to the old weights."""
    shape = TinyShape(experts=4)
    write_adapter(real_lora_dir / "v1", shape, 4, 21)
    write_adapter(real_lora_dir / "v2", shape, 4, 22)
    prompt = "the same long prompt, many pages of it"

    def load(version: str, **more) -> None:
        body = {"lora_name": "live", "lora_path": version} | more
        assert real_client.post("/v1/load_lora_adapter", json=body).is_success

    def ask(model: str) -> list:
        return complete(real_client, model=model, prompt=prompt, logprobs=1)["choices"]

    want = {version: ask(version) for version in ("v1", "v2")}
    assert want["v1"] != want["v2"]
    load("v1")
    assert ask("live") == ask("live") == want["v1"]
    load("v2", load_inplace=True)
    assert ask("live") == ask("live") == want["v2"]
    assert real_client.post("/v1/unload_lora_adapter", json={"lora_name": "live"}).is_success
    refused = real_client.post("/v1/completions", json={"model": "live", "prompt": prompt})
    assert refused.status_code == 404
    load("v1")
    assert ask("live") == want["v1"]
    real_client.delete("/v1/loras/live")


def test_esft_adapters_come_and_go_through_the_same_routes(real_client, real_lora_dir, oracle):
    """Whole experts from a folder, told from LoRA by its files; the oracle has them in place."""
    shape, tensors, _ = oracle
    base = real_lora_dir.parent / "tiny"
    made = {
        name: write_esft_adapter(real_lora_dir / name, base, experts, seed)
        for seed, (name, experts) in enumerate(
            {"x1": {0: (1, 3)}, "x2": {0: (0,), 1: (2,)}}.items()
        )
    }
    prompt = [1, 90, 91, 92, 93]
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}

    def load(folder: str, **more) -> None:
        answer = real_client.post(
            "/v1/load_lora_adapter", json={"lora_name": "esft", "lora_path": folder} | more
        )
        assert answer.is_success, answer.text

    def check(model: str, weights: dict[str, np.ndarray]) -> None:
        got = complete(real_client, model=model, **body)["choices"][0]["logprobs"]
        logits = forward(weights, shape, prompt)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        want = [logprobs[i, token] for i, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(got["token_logprobs"][1:-1], want, atol=2e-4)

    load("x1")
    check("esft", tensors | made["x1"])
    check("tiny", tensors)
    load("x2", load_inplace=True)
    check("esft", tensors | made["x2"])
    check("x1", tensors | made["x1"])  # from the folder on first use
    cards = {card["id"]: card for card in real_client.get("/v1/models").json()["data"]}
    assert cards["x1"]["parent"] == cards["a"]["parent"] == "tiny"
    report = real_client.get("/v1/adapters/esft").json()
    assert (report["kind"], report["resident"]) == ("esft", True)
    assert report["experts"] == {"0": [0], "1": [2]}
    assert report["modules"]["experts.down_proj"]["layers"] == [0, 1]
    sizes = [
        line for line in real_client.get("/metrics").text.splitlines() if 'kind="esft"' in line
    ]
    assert len(sizes) == 1
    assert float(sizes[0].split()[-1]) > 0
    for name in ("esft", "x1"):
        answer = real_client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.is_success
    refused = real_client.post("/v1/completions", json={"model": "esft", "prompt": "x"})
    assert refused.status_code == 404


def test_bad_esft_folders_are_refused_by_name(real_client, real_lora_dir):
    for name, word in write_bad_esft(real_lora_dir, real_lora_dir.parent / "tiny").items():
        body = {"lora_name": "never", "lora_path": name}
        answer = real_client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400, name
        message = answer.json()["error"]["message"]
        assert word in message
        assert str(real_lora_dir) not in message
        wanted = real_client.post("/v1/completions", json={"model": name, "prompt": "x"})
        assert wanted.status_code == 400
    names = {card["id"] for card in real_client.get("/v1/models").json()["data"]}
    assert "never" not in names


def test_metrics_follow_the_real_engine(real_client):
    complete(real_client, model="a", prompt="hello")
    text = real_client.get("/metrics").text
    names = ["vllm:lora_requests_info", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
    names += ["vllm:prompt_tokens_total", "http_requests_total"]
    for name in names:
        assert any(line.startswith(name + "{") for line in text.splitlines()), name
    info = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert len(info) == 1
    running = info[0].split('running_lora_adapters="')[1].split('"')[0]
    assert "a" in running.split(",")


def test_special_tokens_are_shown_only_if_wanted(real_client):
    body = {"tokens": [1, 68, 2]}
    assert not set(SPECIAL) & set(real_client.post("/detokenize", json=body).json()["prompt"])
