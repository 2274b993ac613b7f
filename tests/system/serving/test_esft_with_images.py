"""ESFT, LoRA, both together and the base in one batch with images, over Qwen3-VL-MoE."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.cases.engine_cases import settle
from support.cases.tiny_vision import (
    HOLDER,
    MOE,
    picture,
    write_qwen3_vl,
    write_vision_adapter,
    write_vision_esft,
)
from support.cases.vision_families import VisionFamily

from serving import Engine, Sampling

EXPERTS = {"esft": {0: (1, 3), 2: (0,)}, "other": {0: (1,), 2: (2, 3)}}
FIELDS = {
    "structured_outputs": False,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "mm_processor_kwargs": {"max_pixels": 1024},
    "max_model_len": 64,
    "block_size": 4,
    "max_loras": 2,
    "max_lora_rank": 4,
    "max_esft_adapters": 2,
    "max_esft_experts": 2,
}
ASKED = Sampling(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=0, ignore_eos=True)
IMAGES = [picture(40, 24, 1), picture(24, 40, 2)]
PROMPT = f"look: {HOLDER} what?"
TOGETHER = {"tower": 1.0, "esft": 1.0}  # the slot of a pair, whose LoRA changes the tower


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Iterator[tuple[Engine, VisionFamily, Mapping[str, Any]]]:
    folder = tmp_path_factory.mktemp("vision-moe") / "tiny"
    oracle = write_qwen3_vl(folder, moe=True)
    paths = {name: folder.parent / name for name in ("text", "tower", *EXPERTS)}
    for seed, name in enumerate(("text", "tower"), 1):
        write_vision_adapter(paths[name], seed, tower=name == "tower")
    new = {name: write_vision_esft(paths[name], EXPERTS[name], 5) for name in EXPERTS}
    with Engine(folder, paths, **FIELDS) as engine:
        yield engine, VisionFamily(folder, oracle), new
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0


def ask(engine: Engine, asked: list[tuple[Any, np.ndarray | None]]) -> list[Any]:
    """Return what is answered to pairs of adapter and image."""
    prompts = ["only words" if image is None else PROMPT for _, image in asked]
    images = [[] if image is None else [image] for _, image in asked]
    return engine.generate(prompts, [adapter for adapter, _ in asked], ASKED, images=images)


def bits(output: Any) -> tuple:
    (choice,) = output.outputs
    scores = [(p.logprob, tuple(p.top.items())) for p in choice.logprobs]
    prompt = [None if p is None else p.logprob for p in output.prompt_logprobs]
    return tuple(choice.token_ids), tuple(scores), tuple(prompt)


def merged(oracle: Any, new: Mapping[tuple[int, int], list[np.ndarray]]) -> Any:
    """Return transformers' model with these experts in the place of its own."""
    model = copy.deepcopy(oracle)
    with torch.no_grad():
        for (layer, expert), (gate, up, down) in new.items():
            experts = model.model.language_model.layers[layer].mlp.experts
            width = MOE["moe_intermediate_size"]
            assert experts.gate_up_proj[expert].shape == (2 * width, gate.shape[1])
            experts.gate_up_proj[expert] = torch.from_numpy(np.concatenate([gate, up]))
            experts.down_proj[expert] = torch.from_numpy(down)
    return model


def merge_lora(model: Any, folder: Path) -> None:
    """Add a LoRA of scaling 1 to the weights of transformers' model."""
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name in tensors:
            path, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if found:
                b = tensors[name.replace("lora_A", "lora_B")]
                model.get_submodule(path).weight += torch.from_numpy(b @ tensors[name])


def test_every_kind_has_the_bits_that_it_has_alone(case):
    """Also from the encoder cache, and from KV pages of the same image under other adapters."""
    engine, _, _ = case
    kinds = [None, "esft", "text", "tower", TOGETHER, "other"]
    asked = [(kind, image) for image in IMAGES for kind in kinds] + [("esft", None), (None, None)]
    alone = [bits(ask(engine, [one])[0]) for one in asked]
    assert len(set(alone)) == len(asked)
    for order in (asked, asked[::-1]):
        found = dict(zip(map(str, order), map(bits, ask(engine, order)), strict=True))
        assert [found[str(one)] for one in asked] == alone
    stats = engine.stats()
    assert stats.image_stats.hits > 0
    settle(engine)


def test_an_esft_adapter_says_what_its_merged_model_says(case):
    engine, family, new = case
    for name in EXPERTS:
        model = VisionFamily(family.folder, merged(family.oracle, new[name]))
        (output,) = ask(engine, [(name, IMAGES[0])])
        got = [entry.logprob for entry in output.prompt_logprobs[1:]]
        want = model.logprobs(list(output.prompt_token_ids), IMAGES[:1])
        np.testing.assert_allclose(got, want, atol=1e-4)
        base = family.logprobs(list(output.prompt_token_ids), IMAGES[:1])
        assert np.abs(np.array(got) - base).max() > 0.05


def test_a_pair_is_its_lora_over_its_experts_in_the_tower_too(case):
    engine, family, new = case
    model = merged(family.oracle, new["esft"])
    merge_lora(model, family.folder.parent / "tower")
    (output,) = ask(engine, [(TOGETHER, IMAGES[1])])
    got = [entry.logprob for entry in output.prompt_logprobs[1:]]
    want = VisionFamily(family.folder, model).logprobs(list(output.prompt_token_ids), IMAGES[1:])
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_adapters_that_leave_the_tower_alone_share_an_image(case):
    engine, _, _ = case
    before = engine.stats().image_stats
    adapters = [None, "esft", {"text": 1.0, "esft": 1.0}, TOGETHER]
    outputs = ask(engine, [(adapter, picture(32, 32, 3)) for adapter in adapters])
    assert len({bits(output) for output in outputs}) == len(adapters)
    after = engine.stats().image_stats
    assert (after.queries - before.queries, after.hits - before.hits) == (4, 2)
