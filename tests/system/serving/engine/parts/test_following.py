"""An instance over two processes answers with the bits of one."""

import dataclasses
import json
import os
import secrets
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.engine_cases import prompts_of
from support.cases.head_cases import write_headed_adapter
from support.cases.tiny_checkpoint import TinyShape
from support.processes.server_process import ROOT, free_port

from lora_jax.quantize import quantize
from serving.api.config import EngineConfig
from serving.api.generation_config import NONE
from serving.engine.parts import following

MAIN = ROOT / "tests" / "support" / "processes" / "gang_main.py"
SAMPLINGS = [
    {"max_tokens": 6, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"max_tokens": 8, "temperature": 1.0, "seed": 3, "top_k": 20, "logprobs": 0},
    {"max_tokens": 8, "temperature": 0.0},
    {"max_tokens": 6, "temperature": 0.0, "structured_outputs": {"regex": "[ab]{12}"}},
]


@pytest.fixture
def asked(tmp_path):
    """Chunked prompts to base and adapters, more sequences than pages, a reloaded adapter."""
    shape = TinyShape(layers=1, max_positions=64, experts=4, kv_heads=4)
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    for rank in (1, 3, 4):
        tiny_checkpoint.write_adapter(tmp_path / f"a{rank}", shape, rank, seed=rank)
    config = {
        "model": str(tmp_path / "model"),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "block_size": 4,
        "max_loras": 2,
        "max_lora_rank": 4,
        "max_esft_adapters": 0,
    }
    names = [None, "a1", "a3"] * 4
    return {
        "port": free_port(),
        "size": 2,
        "secret": secrets.token_hex(16),
        "config": config,
        "prompts": prompts_of(12, high=30),
        "adapters": names,
        "samplings": [SAMPLINGS[i // 3] for i in range(12)],
        "modules": {name: str(tmp_path / name) for name in ("a1", "a3", "a4")},
        "again": ["a1", str(tmp_path / "a4")],
        "heads": [],
    }


def run(folder, asked, devices, dtype, ranks, **fields):
    """Answers of rank 0, when every rank has ended well."""
    page = 2 * 4 * 4 * 8 * (2 if dtype == "bfloat16" else 4)
    fields = {"dtype": dtype, "kv_cache_memory_bytes": 20 * page // devices} | fields
    fields |= {"tensor_parallel_size": devices}
    answers, file = folder / "answers.json", folder / "asked.json"
    config = asked["config"] | fields
    file.write_text(json.dumps(asked | {"config": config, "answers": str(answers)}))
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{ROOT / 'tests'}"}
    members = []
    for rank in ranks:
        command = [sys.executable, str(MAIN), str(file), *rank]
        with (folder / f"log{''.join(rank)}").open("w") as log:
            members.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
    ends = [member.wait(timeout=300) for member in members]
    logs = [(folder / f"log{''.join(rank)}").read_text()[-2000:] for rank in ranks]
    assert ends == [0] * len(ranks), logs
    return json.loads(answers.read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "dtype", "fields"),
    [
        (2, "bfloat16", {}),
        (4, "float32", {}),
        (4, "bfloat16", {"enable_expert_parallel": False}),
    ],
    ids=["2-bfloat16-ep", "4-float32-ep", "4-bfloat16-tp"],
)
def test_two_processes_answer_with_the_bits_of_one(tmp_path, asked, devices, dtype, fields):
    want = run(tmp_path, asked, 1, dtype, [()])
    assert len({repr(answer) for answer in want}) == len(want)
    assert run(tmp_path, asked, devices, dtype, [("0",), ("1",)], **fields) == want


@pytest.mark.long
def test_two_processes_serve_what_one_does_beside_other_features(tmp_path, asked):
    """A quantised base, KV and adapters in 8 bits, drafts and a task head, all at once."""
    shape = TinyShape(layers=1, max_positions=64, experts=4, kv_heads=4, hidden=64, width=64)
    tiny_checkpoint.write_model(tmp_path / "base" / "tiny", shape)
    quantize(tmp_path / "base" / "tiny", "nf4", tmp_path / "tiny")
    for rank in (1, 3, 4):
        tiny_checkpoint.write_adapter(tmp_path / f"a{rank}", shape, rank, seed=rank)
    weight = np.random.default_rng(5).normal(size=(3, 64))
    write_headed_adapter(tmp_path / "head", shape, 2, 2, ["no", "yes", "both"], weight)
    asked["modules"]["head"], asked["heads"] = str(tmp_path / "head"), ["head"]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16}  # with room for drafts
    asked["config"] |= sizes | {"model": str(tmp_path / "tiny")}
    # Guesses of rows that are bound to two letters are right now and then.
    asked["prompts"][9:] = ["abababababab", "bbbbbbbbbbbb", "aabaabaabaab"]
    long = {"max_tokens": 20, "temperature": 0.0, "structured_outputs": {"regex": "[ab]{24}"}}
    asked["samplings"][9:] = [long] * 3
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    fields = {
        "kv_cache_memory_bytes": 64 << 10,
        "kv_cache_dtype": "fp8",
        "lora_dtype": "int8",
        "speculative_config": drafts,
    }
    want = run(tmp_path, asked, 1, "bfloat16", [()], **fields)
    assert len({repr(answer) for answer in want}) > 10
    assert run(tmp_path, asked, 2, "bfloat16", [("0",), ("1",)], **fields) == want


def test_a_follower_builds_what_rank_0_builds_and_leaves_when_it_ends(monkeypatch):
    done = []

    def note(name, value=None):
        return lambda *given: done.append((name, *given)) or value

    loop = SimpleNamespace(follow=note("follow"))
    compilations = SimpleNamespace(close=note("compilations"))
    parts = SimpleNamespace(loop=loop, compilations=compilations)
    gang = SimpleNamespace(rank=1, size=2, serve=note("serve"), close=note("close"))
    gang.commands = lambda: ["step"]
    monkeypatch.setattr(
        following,
        "build_parts",
        lambda config, adapters, gang: done.append((config, adapters)) or parts,
    )
    config = EngineConfig("m", max_loras=3, lora_dir="adapters")
    given = dataclasses.replace(config, chat_template="rank 0's", generation_config="rank 0's")
    following.follow(given, gang)
    config = dataclasses.replace(config, generation_config=NONE)  # other files are not read there
    assert done == [(config, {}), ("serve",), ("follow", ["step"]), ("compilations",), ("close",)]
