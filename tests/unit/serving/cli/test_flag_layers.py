"""Flags, environment and config file: the same words, in this order of weight."""

import json
import re

import pytest

from serving.cli.flag_layers import read_layers
from serving.cli.flags import build_parser


def read(argv=(), environ=None) -> dict:
    return read_layers(build_parser(), list(argv), environ or {})


def test_nothing_given_is_nothing_said():
    assert read() == {}


def test_flags_win_over_environment_over_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("max-loras: 1\nmax_num_seqs: 2\nport: 3\napi-key: [a, b]\ndemo: true\n")
    environ = {"SERVING_MAX_NUM_SEQS": "20", "SERVING_PORT": "30", "SERVING_CONFIG": str(path)}
    got = read(["--port", "300"], environ)
    assert (got["max_loras"], got["max_num_seqs"], got["port"]) == (1, 20, 300)
    assert got["api_key"] == ["a", "b"]
    assert got["demo"] is True


def test_lists_are_replaced_not_added_to():
    environ = {"SERVING_API_KEY": "'a b' c", "SERVING_LORA_MODULES": "x=y"}
    assert read([], environ)["api_key"] == ["a b", "c"]
    got = read(["--api-key", "d", "--api-key", "e", "f"], environ)
    assert got["api_key"] == ["d", "e", "f"]
    assert got["lora_modules"] == ["x=y"]


@pytest.mark.parametrize(
    ("value", "wanted"), [("1", True), ("true", True), ("0", None), ("no", None), ("", None)]
)
def test_switches_in_the_environment(value, wanted):
    assert read([], {"SERVING_DEMO": value}).get("demo") is wanted


def test_a_switch_with_a_no_form():
    assert read([], {"SERVING_ENABLE_PREFIX_CACHING": "false"}) == {"enable_prefix_caching": False}


def test_adapters_as_a_mapping_in_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: m\nlora-modules: {a: x/a, b: x/b}\nenable-prefix-caching: off\n")
    got = read(["--config", str(path)])
    assert got["lora_modules"] == ["a=x/a", "b=x/b"]
    assert got["model"] == "m"
    assert got["enable_prefix_caching"] is False


def test_null_in_the_file_is_as_if_left_out(tmp_path, capsys):
    """No key is called None."""
    path = tmp_path / "c.yaml"
    path.write_text("api-key: null\nmax-model-len:\nport: 3\n")
    assert read(["--config", str(path)]) == {"config": str(path), "port": 3}
    path.write_text("api-key: [a, null]\n")
    with pytest.raises(SystemExit):
        read(["--config", str(path)])
    assert "api-key has an entry that is null" in capsys.readouterr().err


def test_adapters_as_a_list_of_objects_in_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("lora-modules: [{name: a, path: x}, b=y]\n")
    given = read(["--config", str(path)])["lora_modules"]
    assert [json.loads(given[0]), given[1]] == [{"name": "a", "path": "x"}, "b=y"]


def test_an_object_is_json_or_a_mapping_in_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("override-generation-config: {top_p: 0.9, eos_token_id: [1, 2]}\n")
    want = {"override_generation_config": {"top_p": 0.9, "eos_token_id": [1, 2]}}
    assert {k: v for k, v in read(["--config", str(path)]).items() if k != "config"} == want
    environ = {"SERVING_OVERRIDE_GENERATION_CONFIG": json.dumps({"top_p": 0.9})}
    assert read([], environ)["override_generation_config"] == {"top_p": 0.9}


@pytest.mark.parametrize("text", ["", "top_k", "[1]", "{"])
def test_what_is_no_object_is_refused(capsys, text):
    with pytest.raises(SystemExit):
        read([f"--override-generation-config={text}"])
    assert "JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("frobnicate: 1", "unknown flag 'frobnicate'"),
        ("specialize-lora: no", "flag 'specialize-lora' (now compile_base_only_steps)"),
        ("- a", "must map flags"),
        ("port: many", "invalid port value: 'many'"),
        ("demo: perhaps", "true or false"),
        ("a: [", "while parsing"),
        ("trust-remote-code: true", "never run here"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, capsys, content, problem):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        read(["--config", str(path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "in the config file" in error


def test_mistakes_in_the_environment_say_so(capsys):
    with pytest.raises(SystemExit):
        read([], {"SERVING_PORT": "tcp://10.0.0.1:80"})
    assert "in the environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SERVING_MAX_LORA", "unknown variable SERVING_MAX_LORA (did you mean SERVING_MAX_LORAS"),
        ("SERVING_BOGUS", "unknown variable SERVING_BOGUS"),
        ("SERVING_LORA_ASIDE", "variable SERVING_LORA_ASIDE (now SERVING_LORA_SEPARATE_STREAM)"),
        ("SERVING_max_loras_", "unknown variable SERVING_max_loras_"),
    ],
)
def test_an_unknown_variable_is_an_error(capsys, variable, words):
    with pytest.raises(SystemExit) as stop:
        read([], {variable: "3", "MAX_LORA": "3"})
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_serve_in_front_says_nothing():
    assert read(["serve", "m", "--port", "1"]) == read(["m", "--port", "1"])
    assert read(["serve", "serve"]) == {"model_tag": "serve"}


def test_both_forms_of_a_switch_in_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("disable-prefix-caching: true\nenable-lora: true\ntrust_remote_code: false\n")
    assert read(["--config", str(path)])["enable_prefix_caching"] is False
    path.write_text("disable-prefix-caching: false\nallowed-origins: [a, b]\n")
    got = read(["--config", str(path)])
    assert got["allowed_origins"] == ("a", "b")
    assert "enable_prefix_caching" not in got


def test_a_flag_of_vllm_in_a_file_is_refused_as_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("enable-lora: false\n")
    with pytest.raises(SystemExit):
        read(["--config", str(path)])
    assert "adapters are always enabled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-model-len", "9", "--context-length", "8"], "--max-model-len and --context-length"),
        (["--instances", "2", "--data-parallel-size", "3"], "--instances and --data-parallel-siz"),
        (["--max-loras", "7", "--max-loras-per-batch", "7"], "--max-loras and --max-loras-per-ba"),
        (["--enable-prefix-caching", "--disable-prefix-caching"], "caching and --disable-prefix"),
        (["m", "--model", "n"], "MODEL is m and --model is n: give one of them"),
    ],
)
def test_two_flags_of_one_setting_that_differ_are_refused(flags, said, capsys):
    with pytest.raises(SystemExit):
        read(flags)
    assert re.search(said, capsys.readouterr().err)


def test_two_flags_of_one_setting_that_agree_and_one_flag_twice_are_taken(tmp_path):
    assert read(["--max-model-len", "9", "--context-length", "9"]) == {"max_model_len": 9}
    assert read(["--max-model-len", "9", "--max-model-len", "8"]) == {"max_model_len": 8}
    assert read(["--max-loras", "6", "--max-loras-per-batch", "7"]) == {"max_loras": 6}
    assert read(["-ep"]) == {"enable_expert_parallel": True}  # vLLM's other spelling
    off = ["--no-enable-prefix-caching", "--disable-prefix-caching"]
    assert read(off) == {"enable_prefix_caching": False}
    assert read(["m", "--model", "m"]) == {"model_tag": "m", "model": "m"}
    path = tmp_path / "c.yaml"
    path.write_text("max-model-len: 5\nmodel: n\n")  # of another layer, which has less weight
    got = read(["m", "--context-length", "9", "--config", str(path)])
    assert (got["max_model_len"], got["model_tag"], got["model"]) == (9, "m", "n")
