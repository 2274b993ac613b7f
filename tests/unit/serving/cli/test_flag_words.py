"""Words of vLLM's command line as the words argparse takes."""

import pytest

from serving.cli.flag_words import did_you_mean, plain_words, unknown_flags


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["m", "--max_loras", "3"], ["m", "--max-loras", "3"]),
        (["--lora_dir=my_dir"], ["--lora-dir=my_dir"]),
        (["my_model", "-tp", "1"], ["my_model", "-tp", "1"]),
        (["-O3"], ["--optimization-level", "3"]),
        (["-O=2"], ["--optimization-level", "2"]),
        (["-O.level=3"], ["--compilation-config", '{"level": 3}']),
        (["--help=Frontend"], ["--help"]),
        (["--f_g.a_b", "1", "--f-g.c.d=x"], ["--f-g", '{"a_b": 1, "c": {"d": "x"}}']),
        (["-cc.mode", "3"], ["-cc", '{"mode": 3}']),
        (["--max-model-len", "-1", "--gpu", "-.5"], ["--max-model-len", "-1", "--gpu", "-.5"]),
    ],
)
def test_spellings(given, words):
    assert plain_words(given) == words


def test_neighbours():
    known = ["--max-loras", "--max-lora-rank", "--port"]
    assert did_you_mean("--max-lora=3", known).startswith(" (did you mean --max-loras")
    assert did_you_mean("--zzz", known) == ""
    assert unknown_flags(["--prt", "3"], known) == (
        "unrecognized arguments: --prt (did you mean --port?) 3"
    )


def test_flags_of_another_name_since_0_1_0_name_it():
    known = ["--specialize-active-lora", "--compile-base-only-steps"]
    assert did_you_mean("--specialize-lora", known) == " (now --compile-base-only-steps)"
    assert did_you_mean("--lora-server-carrier=nixl", known) == " (now --lora-server-transport)"
