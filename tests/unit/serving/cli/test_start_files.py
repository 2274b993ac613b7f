"""A command names a file that its start would fail at before jax is imported."""

import json
import subprocess
import sys

import pytest
from support.cases import adapter_cases as cases
from support.processes.server_process import ROOT

from serving.cli.paths import check_paths
from serving.cli.start_files import check_start_files
from serving.launch import read_options


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    cases.write_adapter(tmp_path / "sql", cases.dense_tensors())
    return tmp_path / "m"


def check(model, *argv: str) -> None:
    check_start_files(read_options([str(model), *argv], {}))


def test_what_fits_is_let_through(model):
    check(model, "--lora-modules", f"sql={model.parent / 'sql'}")
    (model / "tokenizer.json").unlink()
    check(model, "--load-format", "dummy")


def test_a_host_that_follows_needs_no_file_that_rank_0_alone_reads(model):
    """Every host has the same command; templates, adapters and keys may be on rank 0's alone."""
    (secret := model.parent / "secret").write_text("s" * 32)
    split = ["--tensor-parallel-size", "2", "--nnodes", "2", "--nodes-secret-file", str(secret)]
    split += ["--host", "0.0.0.0"]
    files = {
        "--lora-modules": "law=nowhere",
        "--lora-dir": "nowhere",
        "--chat-template": "nowhere.jinja",
        "--generation-config": "nowhere",
        "--keys-file": "nowhere",
        "--ssl-certfile": "nowhere",
    }
    given = [*split, *(word for flag in files.items() for word in flag)]
    options = read_options([str(model), *given, "--node-rank", "1"], {})
    check_paths(options)
    check_start_files(options)
    assert options.http.keys_file is None
    with pytest.raises(SystemExit):  # of the keys, on rank 0
        read_options([str(model), *given], {})
    for flag, value in files.items():
        if flag != "--keys-file":
            options = read_options([str(model), *split, "--insecure", flag, value], {})
            with pytest.raises(ValueError, match=f"^{flag}.* nowhere|^{flag}.*/nowhere"):
                check_paths(options)
    spread = [*given, "--instances", "2", "--node-rank", "1"]
    with pytest.raises(SystemExit):  # each of its processes reads its own files
        read_options([str(model), *spread], {})
    gone = [*split[:5], "nowhere", "--node-rank", "1"]
    with pytest.raises(ValueError, match=r"^--nodes-secret-file: .*nowhere does not exist"):
        check_paths(read_options([str(model), *gone], {}))


def test_an_esft_adapter_is_refused_where_hosts_share_the_model(model):
    (model.parent / "law").mkdir()
    (model.parent / "law" / "expert_cfg.json").write_text("{}")
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--nodes-secret-file", "s"]
    flags += ["--lora-modules", f"law={model.parent / 'law'}"]
    with pytest.raises(ValueError, match="Adapter 'law' is an ESFT adapter, and an instance over"):
        check(model, *flags)
    with pytest.raises(ValueError, match=r"no \.safetensors file"):  # each instance is on one host
        check(model, *flags, "--instances", "2")


def test_a_model_without_a_tokenizer_is_named(model):
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"m has no tokenizer: neither tokenizer\.json nor"):
        check(model)


def test_a_template_that_is_none_is_named(model, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}")
    with pytest.raises(ValueError, match="template"):
        check(model, "--chat-template", str(file))
    check(model)
    (model / "chat_template.jinja").write_text("{{ messages")
    with pytest.raises(ValueError, match="template"):
        check(model)


def test_the_command_ends_at_once_without_jax(model):
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = (
        "import sys; from serving.launch import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('jax' in sys.modules)"
    )
    adapter = f"sql={model.parent / 'sql'}"
    given = [str(model), "--port", "0", "--max-lora-rank", "1", "--lora-modules", adapter]
    command = [sys.executable, "-c", code, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (2, "False")
    assert "Adapter 'sql': adapter_config.json: rank 2 is above the limit of 1" in done.stderr
