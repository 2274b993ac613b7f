"""A command line of SGLang or LoRAX means the same here, or is refused with what to use."""

import re
from pathlib import Path

import pytest

from serving.cli.flags import build_parser
from serving.cli.foreign_flags import vllm_facts
from serving.cli.peer_reasons import (
    PEER_ALWAYS_SO,
    PEER_REFUSED,
    PEER_SPELLINGS,
    PEER_SWITCHES,
)
from serving.launch import read_options


def test_no_flag_has_two_meanings():
    forms = [form for flags in PEER_REFUSED.values() for form in flags.split()]
    assert set(forms) >= set(PEER_SWITCHES.split())
    forms += [key.split()[0] for key in PEER_ALWAYS_SO]
    forms += [form for others in PEER_SPELLINGS.values() for form in others]
    assert len(forms) == len(set(forms))
    vllm = {form for fact in vllm_facts() for form in (*fact.positive, *fact.negative)}
    assert not vllm & set(forms)


@pytest.mark.parametrize("flag", [f"--{key.lstrip('-')}".split() for key in PEER_ALWAYS_SO])
def test_what_is_so_anyway_changes_nothing(flag):
    assert read_options(["m", *flag[:2]], {}) == read_options(["m"], {})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--model-path m --random-seed 3 --dp 2", "m --seed 3 --data-parallel-size 2"),
        ("--model-id m --num-shard 2", "m --tensor-parallel-size 2"),
        ("m --max-loaded-loras 20 --page-size 32", "m --max-cpu-loras 20 --block-size 32"),
        ("m --max-loras-per-batch 8", "m --max-loras 7"),
        ("m --lora-paths a=b", "m --lora-modules a=b"),
        ("m --context-length 64 --max-queued-requests 9", "m --max-model-len 64 --max-queue 9"),
        ("m --disable-radix-cache", "m --no-enable-prefix-caching"),
        ("m --tool-call-parser llama3", "m --tool-call-parser llama3_json"),
        ("m --reasoning-parser deepseek-r1", "m --reasoning-parser deepseek_r1"),
    ],
)
def test_another_name_of_a_flag_does_the_same(theirs, ours):
    assert read_options(theirs.split(), {}) == read_options(ours.split(), {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--lora-drain-wait-threshold 2", "--adapter-wait-s bounds"),
        ("--chunked-prefill-size 4096", "use --max-num-batched-tokens"),
        ("--speculative-algorithm NGRAM", "use --speculative-config"),
        ("--ep-size 2", "only 1 is offered; --enable-expert-parallel"),
        ("--disable-cuda-graph", "one compiled program; leave the flag out"),
        ("--grammar-backend xgrammar", "only llguidance is offered"),
        ("--adapter-memory-fraction 0.1", "use --max-loras"),
        ("--adapter-source hub", "only local is offered; adapters are local folders"),
        ("--preloaded-adapter-ids a b", "use --lora-modules"),
        ("--max-total-tokens 9", "--max-model-len for those of one request"),
        ("--quantize awq", "python -m lora_jax.quantize"),
        ("--schedule-policy lpm", "fcfs"),
    ],
)
def test_what_is_not_offered_is_refused_with_what_to_use(capsys, flags, reason):
    with pytest.raises(SystemExit):
        read_options(["m", *flags.split()], {})
    assert reason in capsys.readouterr().err


def test_the_page_names_flags_that_there_are():
    page = (Path(__file__).parents[4] / "docs/how-to/from-sglang-lorax.md").read_text()
    rows = page.partition("## Flags")[2]
    known = {*build_parser()._option_string_actions, "--out"}
    assert set(re.findall(r"--[a-z][a-z-]+", rows)) <= known
