"""Every family with a tower through the engine, held against transformers, in both dtypes."""

import numpy as np
import pytest
from support.cases.tiny_vision import HOLDER, IMAGE, picture
from support.cases.vision_families import FAMILIES, make_vision_family

from serving import Engine, Sampling

ERROR = {"float32": 1e-4, "bfloat16": 0.03}  # in the median: a token may go to another expert
PICTURES = [picture(40, 24, 1), picture(24, 56, 2)]
SAMPLING = Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
SIZES = {
    "structured_outputs": False,
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_loras": 1,
    "max_lora_rank": 4,
}


def check(name: str, dtype: str, folder, *, wide: bool) -> None:
    """Scores of a prompt with two images are transformers'; bits do not depend on neighbours."""
    family = make_vision_family(name, folder, wide=wide)
    holder = IMAGE if name == "Llava" else HOLDER
    prompts = [f"look: {holder} and {holder} what?", "only words", f"{holder} again"]
    images = [PICTURES, [], PICTURES[1:]]
    fields = {**SIZES, "kv_cache_memory_bytes": 16 << 20, "max_esft_adapters": 0, "dtype": dtype}
    with Engine(folder, max_num_batched_tokens=24, **fields) as engine:
        together = engine.generate(prompts, None, SAMPLING, images=images)
        alone = [
            engine.generate([prompt], None, SAMPLING, images=[mine])[0]
            for prompt, mine in zip(prompts, images, strict=True)
        ]
        assert engine.stats().compilations_after_warmup == 0
    for mine, output in zip(images[::2], together[::2], strict=True):
        got = [entry.logprob for entry in output.prompt_logprobs[1:]]
        want = family.logprobs(list(output.prompt_token_ids), mine)
        assert want.std() > 0.1
        assert np.median(np.abs(np.array(got) - want)) < ERROR[dtype]
        if dtype == "float32":
            np.testing.assert_allclose(got, want, atol=1e-4)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        if dtype == "bfloat16" or not wide:  # on a GPU no kernel is for float32
            assert one.outputs[0].logprobs == other.outputs[0].logprobs


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
