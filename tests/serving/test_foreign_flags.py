"""A command line of another server means the same here, or is refused with the reason."""

import pytest

from serving.launch import read_options

MEANS_NOTHING = [
    "--enable-lora",
    "--enable-chunked-prefill",
    "--no-enable-log-requests",
    "--disable-log-requests",
    "--tensor-parallel-size=1",
    "--tp=1",
    "-tp=1",
    "--pp-size=1",
    "-dp=1",
    "--lora-dtype=auto",
    "--kv-cache-dtype=auto",
    "--lora-eviction-policy=lru",
    "--async-scheduling",
    "--tokenizer-mode=auto",
    "--runner=generate",
]


@pytest.mark.parametrize("flag", MEANS_NOTHING)
def test_what_is_so_anyway_changes_nothing(flag):
    assert read_options(["m", flag], {}) == read_options(["m"], {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trust-remote-code"], "never run here"),
        (["--enforce-eager"], "one compiled program"),
        (["--fully-sharded-loras"], "nothing to shard"),
        (["--max-cpu-loras", "8"], "--max-total-adapter-bytes"),
        (["--max-cpu-loras=8"], "--max-total-adapter-bytes"),
        (["--quantization=awq"], "bfloat16 or float32"),
        (["--tokenizer", "other"], "the model's folder"),
        (["--enable-expert-parallel"], "--lora-server"),
        (["--lora-target-modules", "q_proj", "v_proj"], "any module"),
        (["--lora-backend=triton"], "chosen by device"),
        (["--mem-fraction-static=0.8"], "--gpu-memory-utilization"),
        (["--speculative-config", "{}"], "by the model that is served"),
        (["--tensor-parallel-size=2"], "only 1 is offered; one process serves on one device"),
        (["-tp=2"], "only 1 is offered"),
        (["--data-parallel-size", "4"], "--instances starts several"),
        (["--lora-dtype=float16"], "float16: only auto is offered; adapters are computed in"),
        (["--lora-eviction-policy=fifo"], "only lru is offered"),
        (["--max-lora=1"], "unrecognized"),
    ],
)
def test_what_is_not_offered_is_refused_with_the_reason(capsys, flags, reason):
    with pytest.raises(SystemExit) as stop:
        read_options(["m", *flags], {})
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert reason in said
    assert flags[0].partition("=")[0] in said


def test_other_names_of_our_flags():
    got = read_options(["m", "--context-length", "9", "--max-running-requests", "3"], {})
    assert (got.engine.max_model_len, got.engine.max_num_seqs) == (9, 3)


def test_help_shows_none_of_them(capsys):
    with pytest.raises(SystemExit):
        read_options(["--help"], {})
    shown = capsys.readouterr().out
    assert "--max-loras " in shown
    assert not [flag for flag in MEANS_NOTHING if f"  {flag.partition('=')[0]}" in shown]
    assert "--max-cpu-loras" not in shown
