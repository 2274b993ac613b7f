"""lm_eval's local-completions scores a task over HTTP as our own scoring does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.server_process import post

QUESTIONS = [
    {"question": "User: one two three", "choices": [" four", " apple"], "label": 0},
    {"question": "Translation: and he said to", "choices": [" purple", " them"], "label": 1},
    {"question": "User: 请总结下面这段客服对话", "choices": ["：", " zebra"], "label": 0},
]
TASK = """
task: tinymc
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: question
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def run_lm_eval(server: str, model: str, tokenizer: Path, folder: Path) -> list[dict]:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(q, ensure_ascii=False) + "\n" for q in QUESTIONS))
    (folder / "tinymc.yaml").write_text(TASK.format(data=data))
    model_args = (
        f"model={model},base_url={server}/v1/completions,"
        f"tokenizer_backend=huggingface,tokenizer={tokenizer},num_concurrent=2"
    )
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", model_args, "--include_path", str(folder), "--tasks", "tinymc"]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    samples = next((folder / "out").rglob("samples_*.jsonl"))
    return [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_loglikelihoods_equal_single_requests(
    server, adapters, model_folder, tmp_path, which, monkeypatch
):
    model = adapters[which]
    samples = run_lm_eval(server, model, model_folder, tmp_path)
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        doc = sample["doc"]
        for choice, (loglikelihood, _) in zip(
            doc["choices"], sample["filtered_resps"], strict=True
        ):
            want = continuation_logprob(server, model, doc["question"], choice)
            assert float(loglikelihood) == pytest.approx(want, abs=1e-4)


def continuation_logprob(server: str, model: str, context: str, continuation: str) -> float:
    """Sum of the continuation's token log-probabilities, asked for alone."""

    def ids(text: str) -> list[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return post(f"{server}/tokenize", body)["tokens"]

    whole, prefix = ids(context + continuation), ids(context)
    body = {"model": model, "prompt": [whole], "max_tokens": 1, "temperature": 0}
    answer = post(f"{server}/v1/completions", body | {"echo": True, "logprobs": 1})
    return sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(prefix) : len(whole)])
