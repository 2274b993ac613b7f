"""Every family with a tower through the engine, held against transformers, in both dtypes."""

import dataclasses

import numpy as np
import pytest
from support.cases.tiny_vision import HOLDER, IMAGE, picture
from support.cases.vision_families import FAMILIES, VisionFamily, make_vision_family

from serving import Engine, Sampling

ERROR = {"float32": 1e-4, "bfloat16": 0.03}  # in the median: a token may go to another expert
TIE = {"float32": 1e-4, "bfloat16": 0.25}  # how far below the best a greedy token may score
PICTURES = [picture(40, 24, 1), picture(24, 56, 2)]
SAMPLING = Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
CACHED = dataclasses.replace(SAMPLING, prompt_logprobs=None)  # scores want the whole prompt
SIZES = {
    "structured_outputs": False,
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_loras": 1,
    "max_lora_rank": 4,
}


def check(name: str, dtype: str, folder, *, wide: bool) -> None:
    """Scores and greedy tokens are transformers'; bits depend on no neighbour and no cache."""
    family = make_vision_family(name, folder, wide=wide)
    holder = IMAGE if name == "Llava" else HOLDER
    asked = [(f"{holder} again", PICTURES[1:]), ("only words", [])]
    asked += [(f"look: {holder} and {holder} what?", PICTURES)]
    fields = {**SIZES, "kv_cache_memory_bytes": 16 << 20, "max_esft_adapters": 0, "dtype": dtype}
    with Engine(folder, max_num_batched_tokens=24, **fields) as engine:
        alone = [ask(engine, [one])[0] for one in asked]  # the last one finds an image encoded
        first = engine.stats()
        again = [ask(engine, [one], CACHED)[0] for one in asked]  # from KV pages
        together = ask(engine, asked[::-1])[::-1]
        stats = engine.stats()
        assert stats.compilations_after_warmup == 0
        assert first.image_stats.hits == 1
        assert stats.prefix_hits > first.prefix_hits
    for (_, images), output in zip(asked, alone, strict=True):
        against_transformers(family, images, output, dtype)
    for one, *others in zip(alone, again, together, strict=True):
        for other in others:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            if dtype == "bfloat16" or not wide:  # on a GPU no kernel is for float32
                assert one.outputs[0].logprobs == other.outputs[0].logprobs


def ask(engine: Engine, asked: list[tuple[str, list]], how: Sampling = SAMPLING) -> list:
    prompts, images = [prompt for prompt, _ in asked], [mine for _, mine in asked]
    return engine.generate(prompts, None, how, images=images)


def against_transformers(family: VisionFamily, images: list, output, dtype: str) -> None:
    """Prompt scores are within the error; each greedy token is the best one, or a tie with it."""
    if not images:
        return
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    scores = family.scores([*prompt, *answer], images)
    got = np.array([entry.logprob for entry in output.prompt_logprobs[1:]])
    want = scores[np.arange(len(prompt) - 1), prompt[1:]]
    assert want.std() > 0.1
    assert np.median(np.abs(got - want)) < ERROR[dtype]
    if dtype == "float32":
        np.testing.assert_allclose(got, want, atol=1e-4)
    greedy = scores[len(prompt) - 1 : -1]
    chosen = greedy[np.arange(len(answer)), answer]
    assert (greedy.max(-1) - chosen < TIE[dtype]).all()


@pytest.mark.long  # test_image_requests.py has Qwen3-VL in an engine
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Llava", "Qwen3VLMoe"])
def test_a_family_says_what_transformers_says(name: str, tmp_path):
    check(name, "float32", tmp_path, wide=False)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_bfloat16(name: str, tmp_path):
    check(name, "bfloat16", tmp_path, wide=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ERROR)
def test_a_family_on_a_gpu(name: str, dtype: str, tmp_path):
    check(name, dtype, tmp_path, wide=True)
