"""Paths of the command line: found out before jax is loaded, told whole."""

import subprocess
import sys

import pytest
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
    check(model, "--chat-template", file, "--ssl-certfile", file, "--generation-config", "vllm")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-dir", "{}/none"], "--lora-dir: {}/none does not exist"),
        (["--lora-dir", "{}/m/config.json"], "--lora-dir: {}/m/config.json is a file"),
        (["--lora-modules", "x={}/none"], "--lora-modules x: {}/none does not exist"),
        (["--lora-modules", "x={}/empty"], "{}/empty has no adapter_config.json or expert_cfg"),
        (["--chat-template", "{}/none.jinja"], "--chat-template: {}/none.jinja does not exist"),
        (["--chat-template", "{}/empty"], "{}/empty is a folder"),
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
