"""Flags that the model does not go with are refused from its config.json, at once."""

import json
import re
import subprocess
import sys

import pytest
from support.cases.config_cases import hub
from support.processes.server_process import ROOT

from serving.api.config import EngineConfig
from serving.cli.model_flags import check_model_flags, engines_of
from serving.launch import read_options

VISION = str(ROOT / "assets" / "tiny-vl")
NODES = ["--nnodes", "2", "--nodes-secret-file", "secret"]
RAY = ["--distributed-executor-backend", "ray"]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub("mixtral") | {"num_local_experts": 8}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tensor-parallel-size", "3"], "must divide by 3"),
        (["--tensor-parallel-size", "2", "--lora-merge", "auto"], "lora_merge auto is for one dev"),
        (["--tensor-parallel-size", "2", "--page-pool-bytes", "9"], "go with tensor_parallel_size"),
        (["--lora-server", "1", "--page-pool-bytes", "9"], "does not go with lora server"),
        (["--lora-server", "1", "--lora-merge", "exact"], "start without --lora-server"),
        (["--lora-merge", "auto", "--lora-dtype", "int8"], "leave lora_dtype int8 out"),
        (["--functions", ".", "--page-pool-bytes", "9"], "does not go with shared backbone"),
        (
            ["--functions", ".", "--functions-isolation", "server", "--lora-dtype", "int8"],
            "lora_dtype int8 does not go with isolation 'server'.* use isolation 'process'",
        ),
        (
            ["--tensor-parallel-size", "2", "--max-esft-adapters", "2", *NODES],
            "An instance over several hosts has no max_esft_adapters: set 0",
        ),
        (
            ["--tensor-parallel-size", "2", "--kv-offloading-size", "1", "--nnodes", "2", *RAY],
            "An instance over several hosts has no kv_offloading_size: set 0",
        ),
    ],
)
def test_a_pair_that_does_not_work_is_refused(model, flags, words):
    with pytest.raises(ValueError, match=words):
        check_model_flags(read_options([model, *flags], {}))


OVER_HOSTS = {  # flags that turn a feature on; what is said of them with one instance over hosts
    "ESFT": (["--max-esft-adapters", "2"], "has no max_esft_adapters"),
    "task heads": (["--max-lora-cls-labels", "3"], None),
    "DoRA and biases": (["--enable-dora-and-bias"], "not go with tensor_parallel_size 2"),
    "tokens and saved modules": (
        ["--max-lora-trainable-tokens", "4"],
        "not go with tensor_parallel_size 2",
    ),
    "chosen modules": (["--lora-target-modules", "q_proj"], None),
    "structured outputs": ([], None),
    "speculation": (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
        None,
    ),
    "merged modes": (["--lora-merge", "auto"], "is for one device"),
    "merged primary": (["--lora-modules", "a=x", "--merge-adapter", "a"], "add --instances 2"),
    "quantised base": ([], None),
    "adapters in 8 bits": (["--lora-dtype", "int8"], None),
    "KV cache in 8 bits": (["--kv-cache-dtype", "fp8"], None),
    "KV pages on the host": (["--kv-offloading-size", "1"], "has no kv_offloading_size"),
    "page pool": (["--page-pool-bytes", "9"], "does not go with tensor_parallel_size 2"),
    "several devices": ([], None),
    "LoRA Server": (["--lora-server", "1"], "serves instances of one host each"),
    "isolated functions": (["--functions", "."], "--functions does not work with .* or --nnodes"),
    "loads at run time": (["--enable-runtime-lora", "--lora-dir", "."], None),
}


@pytest.mark.parametrize("feature", OVER_HOSTS)
def test_what_one_instance_over_hosts_serves_is_as_the_page_says(model, feature, capsys):
    flags, words = OVER_HOSTS[feature]
    page = (ROOT / "docs/reference/feature-pairs.md").read_text().partition("## Over several")[2]
    said = {row[1]: row[2] for row in re.findall(r"^(\| (.+?) \| (\w+) \|)", page, re.MULTILINE)}
    assert set(said) == {*OVER_HOSTS, "images", "---"} - {"---"}
    assert said[feature] == ("yes" if words is None else "no")
    given = [model, "--tensor-parallel-size", "2", "--nnodes", "2", *RAY, *flags]
    try:
        check_model_flags(read_options(given, {}))
        found = None
    except ValueError as error:
        found = str(error)
    except SystemExit:
        found = capsys.readouterr().err
    assert re.search(words, found) if words else found is None, found


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "2", *NODES],
        ["--instances", "2", "--kv-offloading-size", "1", *NODES],  # each on one host
        ["--instances", "2", "--lora-modules", "a=x", "--merge-adapter", "a", *NODES],
    ],
)
def test_what_works_together_is_taken(model, flags):
    check_model_flags(read_options([model, *flags], {}))


def test_images_are_for_one_host():
    flags = ["--tensor-parallel-size", "2", *NODES]
    with pytest.raises(ValueError, match="which one process serves: start it with --nnodes 1"):
        check_model_flags(read_options([VISION, *flags], {}))


def test_a_model_that_cannot_be_read_is_left_to_its_engine(tmp_path):
    for text in ("{}", "{", "[]", '{"model_type": "gpt2"}'):
        (tmp_path / "config.json").write_text(text)
        check_model_flags(read_options([str(tmp_path), "--tensor-parallel-size", "3"], {}))


def test_the_last_instance_has_the_merged_adapter_and_the_others_merge_in_turn():
    engine = EngineConfig("m", merge_adapter="a1", lora_merge="auto")
    last, other = engines_of(engine)
    assert (last.merge_adapter, last.lora_merge) == ("a1", "off")
    assert (other.merge_adapter, other.lora_merge) == (None, "auto")
    assert engines_of(other) == (other, other)


def test_a_command_says_so_without_jax(model):
    code = (
        "import sys; from serving.launch import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code, model, "--tensor-parallel-size", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "must divide by 3. Choose another tensor_parallel_size" in done.stderr
