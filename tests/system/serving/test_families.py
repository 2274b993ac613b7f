"""Every family of models through the kernels of a GPU, held against transformers and PEFT."""

from typing import Any

import numpy as np
import pytest

from serving import Engine, Sampling

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV2")
RANK = 8
SAMPLING = Sampling(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
ERROR = {"float32": 1e-4, "bfloat16": 0.03}  # in the median: a token may go to another expert


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    from support.cases import family_cases

    return family_cases.make_family(request.param, RANK, tmp_path_factory.mktemp(request.param))


def run(engine, prompts, names):
    """Tokens and log-probabilities of the answers, log-probabilities of the prompts."""
    outputs = engine.generate(prompts, names, SAMPLING)
    answers = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
    return answers, [[entry.logprob for entry in o.prompt_logprobs[1:]] for o in outputs]


def distance(some, others):
    """Return the median difference of log-probabilities."""
    return np.median(np.abs(np.concatenate(some) - np.concatenate(others)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:The following .*_pattern keys")
@pytest.mark.parametrize("dtype", ERROR)
def test_a_family_says_what_transformers_and_peft_say(family, dtype):
    """With and without an adapter, alone and in one batch."""
    sizes: dict[str, Any] = {
        "structured_outputs": False,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    sizes |= {"max_loras": 2, "max_lora_rank": 2 * RANK, "max_esft_adapters": 0}
    sizes |= {"kv_cache_memory_bytes": 64 << 20, "dtype": dtype}
    prompts, names = 2 * family.prompts, [None] * 3 + ["a"] * 3
    with Engine(family.model, adapters={"a": str(family.adapter)}, **sizes) as engine:
        answers, got = run(engine, prompts, names)
        alone = [run(engine, [p], [n])[0][0] for p, n in zip(prompts, names, strict=True)]
    assert distance(got[:3], family.base) < ERROR[dtype]
    assert distance(got[3:], family.adapted) < ERROR[dtype]
    assert distance(family.base, family.adapted) > 5 * ERROR["bfloat16"]
    assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in answers]
    if dtype == "bfloat16":  # no kernel is for float32: sums there depend on the size of a step
        assert alone == answers
