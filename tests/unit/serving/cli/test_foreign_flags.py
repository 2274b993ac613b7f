"""A command line of another server means the same here, or is refused with the reason."""

import contextlib
import io

import pytest

from serving.cli.flags import build_parser
from serving.cli.foreign_flags import Fact, verdict, vllm_facts, vllm_source
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
    "--lora-eviction-policy=lru",
    "--async-scheduling",
    "--tokenizer-mode=auto",
    "--runner=generate",
    "--structured-outputs-config.backend=guidance",
    '--structured-outputs-config={"backend":"auto"}',
    "--enable-reasoning",
    "--use-v2-block-manager",
]


@pytest.mark.parametrize("flag", MEANS_NOTHING)
def test_what_is_so_anyway_changes_nothing(flag):
    assert read_options(["m", flag], {}) == read_options(["m"], {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trust-remote-code"], "never run here"),
        (["--fully-sharded-loras"], "the whole A"),
        (["--enforce-eager"], "one compiled program; leave the flag out"),
        (["--quantization-config", "{}x"], "quantization_config sets it; python -m"),
        (["--tokenizer", "other"], "the model's folder"),
        (["--enable-expert-parallel"], "set tensor_parallel_size"),
        (["--enable-eplb"], "share experts in order"),
        (["--lora-backend=triton"], "chosen by device"),
        (["--mem-fraction-static=0.8"], "--gpu-memory-utilization"),
        (["--spec-model", "x"], "copied from the text: --speculative-config"),
        (["--pipeline-parallel-size=2"], "only 1 is offered; one process serves on the devices"),
        (["--pp-size=2"], "only 1 is offered"),
        (["--data-parallel-rank", "4"], "--instances starts several"),
        (["--lora-dtype=float16"], "lora_dtype must be one of auto, int8, got 'float16'"),
        (["--lora-eviction-policy=fifo"], "only lru is offered"),
        (
            ["--structured-outputs-config", '{"backend": "xgrammar"}'],
            'or {"backend": "guidance"} is offered',
        ),
        (["--structured-outputs-config", "{"], "is offered"),
        (["--speculative-model", "x"], "use --speculative-config"),
        (["--enable-lora-bias"], "use --enable-dora-and-bias"),
        (["--worker-use-ray"], "--distributed-executor-backend ray"),
        (["--disable-mm-preprocessor-cache"], "--mm-processor-cache-gb 0"),
        (["--cuda-graph-sizes", "1", "2"], "one compiled program; leave the flag out"),
        (["--max-lora=1"], "unrecognized"),
    ],
)
def test_what_is_not_offered_is_refused_with_the_reason(capsys, flags, reason):
    with pytest.raises(SystemExit) as stop:
        read_options(["m", *flags], {})
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert reason in said
    assert flags[0].partition("=")[0].strip("-").replace("-", "_") in said.replace("-", "_")


def test_one_start_names_every_flag_that_is_refused(capsys):
    """A long command of vLLM is repaired in one go."""
    argv = ["m", "--swap-space", "4", "--enforce-eager", "--max-lorass", "8", "--max-loras", "4"]
    with pytest.raises(SystemExit) as stop:
        read_options([*argv, "--pipeline-parallel-size", "2"], {})
    assert stop.value.code == 2
    said = capsys.readouterr().err.partition("error: ")[2].splitlines()
    assert said[0] == "4 flags are not offered; change or remove them:"
    assert [line.split()[0] for line in said[1:4]] == [
        "--swap-space:",
        "--enforce-eager:",
        "--pipeline-parallel-size",
    ]
    assert "--max-lorass (did you mean --max-loras" in said[4]


@pytest.mark.parametrize("flag", ["--tensor-parallel-size=2", "-tp=2", "--tp=2", "--tp-size=2"])
def test_devices_of_a_split_model(flag):
    assert read_options(["m", flag], {}).engine.tensor_parallel_size == 2
    by_outputs = read_options(["m", flag, "--no-enable-expert-parallel"], {}).engine
    assert by_outputs.enable_expert_parallel is False


def test_names_of_fp8():
    for name in ("fp8", "fp8_e4m3", "fp8_per_token_head"):
        assert read_options(["m", "--kv-cache-dtype", name], {}).engine.kv_cache_dtype == "fp8"


def test_other_names_of_our_flags():
    got = read_options(["m", "--context-length", "9", "--max-running-requests", "3"], {})
    assert (got.engine.max_model_len, got.engine.max_num_seqs) == (9, 3)


def forms_of(fact: Fact) -> list[str]:
    """Every spelling of a flag, with underscores too."""
    forms = [*fact.positive, *fact.negative]
    return forms + [f"--{form[2:].replace('-', '_')}" for form in forms if form.startswith("--")]


# A value that each kind of flag takes where the table below has no other.
VALUES = {"value": ["1"], "list": ["1"], "maybe": ["1"], "json": ['{"a": 1}']}
OURS = {
    "--dtype": "auto",
    "--log-level": "INFO",
    "--uvicorn-log-level": "info",
    "--mm-processor-kwargs": '{"max_pixels": 4096}',
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}',
    "--tool-call-parser": "hermes",
    "--reasoning-parser": "qwen3",
}


@pytest.fixture(scope="module")
def parser():
    return build_parser()


def said_of(parser, argv: list[str]) -> str:
    """What the parser says of these words: nothing when it takes them."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        parser.parse_args(["m", *argv])
    return said.getvalue()


def test_no_flag_of_vllm_is_unknown(parser):
    """Every spelling of each flag is taken, or refused with the reason that the tables have."""
    wrong = []
    for fact in vllm_facts():
        value = [OURS[fact.flag]] if fact.flag in OURS else VALUES.get(fact.kind, [])
        for form in forms_of(fact):
            said, told = said_of(parser, [form, *value]), verdict(fact)
            own = told is None or form.replace("_", "-") in told.accepted
            if said if own else told.reason not in said and "*" not in told.accepted:
                accepted = told is not None and value[:1] and value[0] in told.accepted
                wrong += [] if accepted and not said else [(form, said)]
    assert wrong == []


def test_a_switch_has_one_form_that_is_taken(parser):
    for fact in vllm_facts():
        told = verdict(fact)
        if fact.kind == "pair" and told is not None:
            taken = {
                form for form in (*fact.positive, *fact.negative) if not said_of(parser, [form])
            }
            assert taken in (set(fact.positive), set(fact.negative)), fact.flag
            assert taken == set(told.accepted)


def test_what_vllm_does_by_default_is_no_mistake_where_the_thing_is_refused(parser):
    for fact in vllm_facts():
        told = verdict(fact)
        if told is None or told.so or fact.kind != "value" or fact.default in (None, ""):
            continue
        assert said_of(parser, [fact.flag, str(fact.default)]) == "", fact.flag
        assert told.reason in said_of(parser, [fact.flag, f"{fact.default}9"])


def test_the_facts_are_those_of_one_release():
    assert "0.33.0" in vllm_source()
    assert len(vllm_facts()) == 320
    assert len({fact.flag for fact in vllm_facts()}) == 320


def test_an_older_release_s_words_for_devices(capsys):
    assert read_options(["m", "--device", "auto"], {}) == read_options(["m"], {})
    with pytest.raises(SystemExit):
        read_options(["m", "--device", "cuda"], {})
    assert "JAX_PLATFORMS" in capsys.readouterr().err
