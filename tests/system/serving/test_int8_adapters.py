"""Adapters in 8 bits in an engine: near the files' values, the same bits in any company."""

import numpy as np
import pytest
from support.processes.server_process import ROOT

from serving import Engine, Sampling

MODEL = ROOT / "assets/tiny-moe"
ADAPTERS = {name: str(MODEL / "adapters" / name) for name in ("intent", "law", "translation")}
ESFT = {"gate-law": str(MODEL / "esft/gate-law")}
SUM = {"law": 0.7, "intent": 0.5}
PAIR = {"law": 1.0, "gate-law": 1.0}
PROMPTS = [[5, 9, 17, 33, 65, 129], [7] * 20, list(range(40, 90))]
SIZES = {
    "structured_outputs": False,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_loras": 4,
    "max_lora_rank": 32,
    "max_esft_adapters": 1,
}


def engine_of(**changes) -> Engine:
    return Engine(str(MODEL), adapters=ADAPTERS | ESFT, **(SIZES | changes))


def answers(engine: Engine, asked: list) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their log-probabilities of (prompt, adapter) pairs, in one batch."""
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    prompts, adapters = zip(*asked, strict=True)
    outputs = [o.outputs[0] for o in engine.generate(list(prompts), list(adapters), sampling)]
    return [(list(o.token_ids), [p.logprob for p in o.logprobs]) for o in outputs]


ASKED = [(p, a) for p in PROMPTS for a in (None, *ADAPTERS, *ESFT, SUM, PAIR)]


def test_a_request_has_the_bits_it_has_alone():
    """With KV pages in 8 bits too, so that one engine tests both."""
    with engine_of(lora_dtype="int8", kv_cache_dtype="fp8") as engine:
        together = answers(engine, ASKED)
        for asked in ASKED[:7]:
            assert answers(engine, [asked]) == [together[ASKED.index(asked)]]
        assert len({tuple(tokens) for tokens, _ in together[-7:]}) > 3


@pytest.mark.long
def test_answers_are_near_those_of_plain_adapters():
    with engine_of(lora_dtype="int8") as engine:
        coded, host = answers(engine, ASKED), dict(engine.stats().adapter_bytes)
    with engine_of() as engine:
        plain, plain_host = answers(engine, ASKED), dict(engine.stats().adapter_bytes)
    assert host["lora"] < 0.53 * plain_host["lora"]
    assert host["esft"] == plain_host["esft"]
    first = [[logprobs[0] for _, logprobs in of] for of in (coded, plain)]
    np.testing.assert_allclose(*first, atol=0.1)
    for (_, adapter), got, want in zip(ASKED, coded, plain, strict=True):
        if adapter is None or (isinstance(adapter, str) and adapter in ESFT):
            assert got == want


@pytest.mark.long
def test_speculation_gives_the_same_bits():
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    in_8_bits = {"lora_dtype": "int8", "kv_cache_dtype": "fp8"}
    with engine_of(**in_8_bits) as engine:
        want = answers(engine, ASKED)
    with engine_of(**in_8_bits, speculative_config=ngram) as engine:
        assert answers(engine, ASKED) == want


@pytest.mark.long
def test_two_devices_give_the_bits_of_one():
    asked = [pair for pair in ASKED if pair[1] not in (*ESFT, PAIR)]
    changes = {"lora_dtype": "int8", "kv_cache_dtype": "fp8", "max_esft_adapters": 0}
    with Engine(str(MODEL), adapters=ADAPTERS, **(SIZES | changes)) as engine:
        want = answers(engine, asked)
    changes["tensor_parallel_size"] = 2
    with Engine(str(MODEL), adapters=ADAPTERS, **(SIZES | changes)) as engine:
        assert answers(engine, asked) == want
