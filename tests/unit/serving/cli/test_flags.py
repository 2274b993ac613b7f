"""The command line's flags: every field has one, and --help says what it takes."""

import dataclasses

import pytest

from serving.api.config import EngineConfig
from serving.cli.flag_help import ENGINE_HELP
from serving.cli.flag_layers import read_layers
from serving.cli.flags import build_parser


def read(*argv: str) -> dict:
    return read_layers(build_parser(), argv, {})


def help_text() -> str:
    return " ".join(build_parser().format_help().split())


def test_every_engine_field_is_a_flag_with_help():
    for field in dataclasses.fields(EngineConfig):
        if field.name in ("model", "served_model_name"):
            continue
        flag = field.name.replace("_", "-")
        assert ENGINE_HELP[field.name]
        if isinstance(field.default, bool) or field.type == bool | None:
            assert read(f"--no-{flag}") == {field.name: False}
        elif field.type is dict:
            assert read(f"--{flag}", '{"top_k": 3}') == {field.name: {"top_k": 3}}
        elif field.type is str or field.type == str | None:
            assert read(f"--{flag}", "x") == {field.name: "x"}
        elif field.name == "lora_target_modules":
            assert read(f"--{flag}", "q_proj", "v_proj") == {field.name: ["q_proj", "v_proj"]}
        else:
            assert read(f"--{flag}", "7") == {field.name: 7}


def test_sglang_s_spellings():
    got = read(*["--model-path", "m", "--lora-paths", "a=b", "--context-length", "9", "--tp", "1"])
    assert got["model"] == "m"
    assert got["lora_modules"] == ["a=b"]
    assert got["max_model_len"] == 9


def test_help_shows_choices_and_units():
    shown = help_text()
    for words in (
        "--dtype {auto,float32,bfloat16}",
        "--scheduling-policy {fcfs,sjf}",
        "--lora-attention {local,remote}",
        "--kv-cache-memory-bytes BYTES",
        "--lora-dir DIR",
        "--adapter-wait-s SECONDS",
    ):
        assert words in shown
    assert " STR" not in shown
    assert " INT" not in shown


def test_help_shows_flags_of_vllm_that_are_true_anyway():
    shown = help_text()
    assert "--enable-request-id-headers every answer has the header X-Request-Id" in shown
    assert "--runner auto|generate models only generate text" in shown
    assert "--enforce-eager" not in shown
    assert "docs/vllm_flags.md" in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "a port is in [0, 65535], got 70000"),
        (["--port", "-1"], "a port is in [0, 65535], got -1"),
        (["--dtype", "half"], "use bfloat16, of as many bytes, or float32"),
        (["--dtype", "float16"], "float16 is not offered"),
        (["--scheduling-policy", "priority"], "use fcfs or sjf"),
        (["--max-num-seqs", "many"], "must be a whole number, such as 16, 2k or 4G, got 'many'"),
        (["--gpu-memory-utilisation", "1"], "did you mean --gpu-memory-utilization?"),
        (["--lora_module", "a=b"], "did you mean --lora-modules"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate\n"),
    ],
)
def test_mistakes_say_what_to_change(capsys, argv, words):
    with pytest.raises(SystemExit) as stop:
        read(*argv)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_vllm_s_words_for_our_values():
    assert read("--dtype", "float") == {"dtype": "float32"}
    assert read("--max-model-len", "auto") == {"max_model_len": None}
    assert read("--max-model-len", "-1") == {"max_model_len": None}
    assert read("--max-model-len", "2K", "--max-num-batched-tokens", "1.5k") == {
        "max_model_len": 2048,
        "max_num_batched_tokens": 1500,
    }
    assert read("--log-level", "DEBUG") == {"log_level": "debug"}
