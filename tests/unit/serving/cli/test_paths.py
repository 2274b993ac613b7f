"""Paths of the command line: found out before jax is loaded, told whole."""

import contextlib
import json
import subprocess
import sys

import pytest
from support.processes.certificates import make_certificate, run_openssl
from support.processes.server_process import ROOT

from serving.cli.paths import check_paths
from serving.launch import main, read_options


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    return tmp_path / "m"


def check(model, *argv: str) -> None:
    check_paths(read_options([str(model), *argv], {}))


def test_what_is_there_is_let_through(model):
    file = str(model / "config.json")
    check(model, "--lora-dir", str(model.parent), "--lora-modules", f"a={model.parent / 'a'}")
    check(model, "--chat-template", file, "--generation-config", "vllm")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-dir", "{}/none"], "--lora-dir: {}/none does not exist"),
        (["--lora-dir", "{}/m/config.json"], "--lora-dir: {}/m/config.json is a file"),
        (["--lora-modules", "x={}/none"], "--lora-modules x: {}/none does not exist; give NAME="),
        (["--lora-modules", "x={}/empty"], "{}/empty has no adapter_config.json or expert_cfg"),
        (["--lora-modules", "x={}/m"], "{}/m is a model; give the folder of an adapter, which has"),
        (["--chat-template", "{}/none.jinja"], "--chat-template: {}/none.jinja does not exist"),
        (["--chat-template", "{}/empty"], "{}/empty is a folder"),
        (["--chat-template", "/dev/null"], "/dev/null is no regular file"),
        (["--generation-config", "{}/empty"], "{}/empty has no generation_config.json"),
        (["--provision", "{}/none"], "--provision: {}/none does not exist"),
        (["--ssl-keyfile", "{}/none"], "--ssl-keyfile: {}/none does not exist"),
    ],
)
def test_what_leads_nowhere_is_named_with_the_whole_path(model, argv, message):
    argv = [word.format(model.parent) for word in argv]
    with pytest.raises(ValueError, match="--") as error:
        check(model, *argv)
    assert message.format(model.parent) in str(error.value)


@pytest.mark.parametrize("flag", ["--lora-dir", "--functions"])
def test_one_adapter_is_no_folder_of_adapters(model, flag, tmp_path):
    """It would be served as a folder in which there is none."""
    one = tmp_path / "one"
    for folder in (one, one / "checkpoint"):
        folder.mkdir()
        (folder / "adapter_config.json").touch()
    check(model, flag, str(tmp_path))
    check(model, flag, str(one))
    (one / "checkpoint" / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=f"{flag}: {one} is one adapter, .* holds it, {tmp_path}"):
        check(model, flag, str(one))


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> dict[str, str]:
    """Certificate and key, another key, and the key under a pass phrase."""
    folder = tmp_path_factory.mktemp("tls")
    names = ("cert", "key", "other", "other-key", "locked")
    paths = {name: folder / name for name in names}
    make_certificate(paths["cert"], paths["key"])
    make_certificate(paths["other"], paths["other-key"])
    made = {name: str(path) for name, path in paths.items()}
    locked = ("-aes128", "-passout", "pass:abcd", "-out", made["locked"])
    run_openssl("ec", "-in", made["key"], *locked)
    return made


def test_certificate_and_key_fit_before_anything_is_loaded(model, tls):
    check(model, "--ssl-certfile", tls["cert"], "--ssl-keyfile", tls["key"])
    check(model, "--ssl-certfile", tls["cert"], "--ssl-keyfile", tls["locked"])
    for other in (tls["other-key"], str(model / "config.json")):
        with pytest.raises(ValueError, match=r"--ssl-certfile .*/cert and --ssl-keyfile .*PEM"):
            check(model, "--ssl-certfile", tls["cert"], "--ssl-keyfile", other)
    with pytest.raises(ValueError, match="give a certificate in PEM format and the key"):
        check(model, "--ssl-certfile", tls["cert"])  # no key in it
    pair = ["--ssl-certfile", tls["cert"], "--ssl-keyfile", tls["key"]]
    check(model, *pair, "--ssl-ca-certs", tls["other"])
    with pytest.raises(ValueError, match=r"--ssl-ca-certs .*give certificates in PEM"):
        check(model, *pair, "--ssl-ca-certs", tls["key"])
    with pytest.raises(ValueError, match="--ssl-ciphers NONE: not readable; give ciphers"):
        check(model, *pair, "--ssl-ciphers", "NONE")


@pytest.mark.parametrize(
    "flags", [("--ssl-keyfile", "{}/m/config.json"), ("--ssl-ca-certs", "{}/m/config.json")]
)
def test_tls_without_a_certificate_is_refused(model, flags):
    """With these flags alone uvicorn ended after the load, or answered without TLS."""
    with pytest.raises(ValueError, match=f"{flags[0]} needs the certificate too"):
        check(model, *(word.format(model.parent) for word in flags))


@pytest.mark.parametrize(
    ("config", "flag", "message"),
    [
        ({"quant_method": "awq"}, "awq", ""),
        ({"quant_method": "gptq"}, "gptq_marlin", ""),
        ({"quant_method": "mxfp4"}, "gpt_oss_mxfp4", ""),
        ({"quant_method": "gptq"}, "awq", "--quantization awq: config.json says gptq; leave"),
        (None, "fp8", "names no quantisation; python -m lora_jax.quantize writes"),
        (None, "none", ""),
    ],
)
def test_vllm_s_quantization_has_to_be_that_of_the_files(model, config, flag, message):
    (model / "config.json").write_text(json.dumps({"quantization_config": config}))
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        check(model, "--quantization", flag)


def test_the_section_is_found_where_the_engine_finds_it(model):
    (model / "config.json").write_text(json.dumps({"compression_config": {"quant_method": "x"}}))
    check(model, "--quantization", "x")
    (model / "config.json").write_text(json.dumps({"compression_config": 3}))
    check(model, "--quantization", "x")  # the engine says what is wrong


def test_a_model_that_is_none(model):
    for name, message in (("none", "does not exist"), ("empty", "has no config.json")):
        with pytest.raises(ValueError, match=message) as error:
            check(model.parent / name)
        assert str(model.parent / name) in str(error.value)


def test_relative_paths_are_told_whole(model, monkeypatch, capsys):
    monkeypatch.chdir(model.parent)
    with pytest.raises(SystemExit) as stop:
        main(["m", "--lora-dir", "nowhere"])
    assert stop.value.code == 2
    assert f"--lora-dir: {model.parent}/nowhere does not exist" in capsys.readouterr().err


def test_jax_is_not_loaded_for_it(model):
    code = (
        "import sys; from serving.launch import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: sys.exit('jax' in sys.modules)"
    )
    argv = [str(model), "--lora-dir", str(model.parent / "none")]
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_an_adapter_in_the_place_of_the_model_is_told(model):
    folder = str(model.parent / "a")
    with pytest.raises(ValueError, match=f"{folder} is an adapter; .* --lora-modules NAME="):
        check_paths(read_options([folder], {}))


def test_a_repository_of_the_hub_s_cache_and_a_name_on_the_hub_are_told(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--m" / "snapshots" / "d04e59"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    check(snapshot)
    with pytest.raises(ValueError, match=f"has no config.json; give a snapshot .* {snapshot}"):
        check(snapshot.parents[1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"org/m does not exist; .*; .* `hf download org/m` prints"
    ):
        check("org/m")
