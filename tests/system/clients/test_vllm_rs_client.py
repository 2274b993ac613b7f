"""vLLM's Rust load generator: two adapters in turn, each text as sent alone; a bench's point."""

import json
import subprocess

import pytest
from support.processes.server_process import ROOT, post

from bench.end_to_end.points import Point, Target

VLLM_RS = ROOT / ".cache" / "vllm-rs"
PROMPTS = [f"User: number {i} of the list is" for i in range(12)]


@pytest.fixture(scope="module")
def vllm_rs() -> str:
    if not VLLM_RS.exists():
        pytest.skip("no .cache/vllm-rs: `make test` fetches it")
    return str(VLLM_RS)


def test_two_adapters_round_robin_equal_alone(server, adapters, model_folder, vllm_rs, tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    names = adapters[:2]
    command = [vllm_rs, "bench", "serve", "--backend", "openai", "--base-url", server]
    command += ["--model", model_folder.name, "--tokenizer", str(model_folder)]
    command += ["--dataset-name", "custom", "--dataset-path", str(dataset), "--disable-shuffle"]
    command += ["--custom-output-len", "12", "--num-prompts", str(len(PROMPTS)), "--ignore-eos"]
    command += ["--request-rate", "50", "--lora-modules", *names]
    command += ["--lora-assignment", "round-robin", "--extra-body", '{"temperature": 0}']
    command += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    command += ["--result-filename", "result.json", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == len(PROMPTS)
    alone = {
        (name, prompt): complete_alone(server, name, prompt) for name in names for prompt in PROMPTS
    }
    for i, (prompt, text) in enumerate(zip(PROMPTS, result["generated_texts"], strict=True)):
        assert text == alone[names[i % 2], prompt], f"request {i}"
    assert any(alone[names[0], p] != alone[names[1], p] for p in PROMPTS)


@pytest.mark.long
def test_a_point_of_the_bench_is_measured(server, adapters, model_folder, vllm_rs, tmp_path):
    target = Target(server, model_folder.name, model_folder, vllm_rs)
    point = Point("adapters", 2, 4, prompt=8, answer=4, names=tuple(adapters[:2]))
    row = target.measure(point, 0, tmp_path / "raw.json")
    assert (row["completed"], row["total_output_tokens"]) == (4, 16)
    assert row["output_throughput"] > 0
    unknown = Point("unknown", 2, 4, prompt=8, answer=4, names=("nobody",))
    with pytest.raises(RuntimeError, match="0 of 4 requests"):
        target.measure(unknown, 0, tmp_path / "unknown.json")


def complete_alone(server: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = post(f"{server}/v1/completions", body | {"ignore_eos": True})
    return answer["choices"][0]["text"]
