"""Random models of every family with a tower, small or wide enough for a GPU's kernels."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.cases.tiny_checkpoint import write_tokenizer
from support.cases.tiny_vision import END, IMAGE_ID, PROCESSOR, START, TEMPLATE, TOKENS

from lora_jax.config import from_hf
from lora_jax.vision.processor import preprocess, read_settings

FAMILIES = ("Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL", "Llava")
_SIDE, _PATCH = 24, 4  # of LLaVA's images
_IDS = {
    "image_token_id": IMAGE_ID,
    "vision_start_token_id": TOKENS.index(START),
    "vision_end_token_id": TOKENS.index(END),
    "video_token_id": 263,
}


@dataclasses.dataclass(frozen=True, eq=False)
class VisionFamily:
    """A checkpoint folder, and transformers' model in float32 with the same weights."""

    folder: Path
    oracle: Any

    def logprobs(self, tokens: list[int], images: list[np.ndarray]) -> np.ndarray:
        """Return float32 log-probabilities of each token but the first, by transformers."""
        return self.scores(tokens, images)[np.arange(len(tokens) - 1), tokens[1:]]

    def scores(self, tokens: list[int], images: list[np.ndarray]) -> np.ndarray:
        """Return float32 log-probabilities [tokens, vocab] of what follows each token."""
        config = from_hf(json.loads((self.folder / "config.json").read_text())).tower
        settings = read_settings(self.folder, config)
        made = [preprocess(image, settings) for image in images]
        values = [patches.normalised(settings) for patches in made]
        ids = torch.tensor([tokens])
        if config.family == "clip":
            count = _SIDE // _PATCH
            cut = np.stack(values).reshape(-1, count, count, 3, _PATCH, _PATCH)
            pixels = cut.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, _SIDE, _SIDE)
            more = {"pixel_values": torch.from_numpy(pixels.copy())}
        else:
            more = {
                "pixel_values": torch.from_numpy(np.concatenate(values)),
                "image_grid_thw": torch.tensor([[1, *patches.grid] for patches in made]),
                "mm_token_type_ids": (ids == IMAGE_ID).int(),
            }
        with torch.no_grad():
            logits = self.oracle(input_ids=ids, **more).logits[0].float()
        return torch.log_softmax(logits, -1).numpy()


def make_vision_family(name: str, folder: Path, *, wide: bool = False) -> VisionFamily:
    """Write a model of bfloat16 numbers with its tokenizer and processor to `folder`."""
    torch.manual_seed(0)
    drawn = getattr(transformers, f"{name}ForConditionalGeneration")(_config(name, wide))
    with torch.no_grad():
        for parameter in drawn.parameters():
            if parameter.ndim > 1:  # activations keep their size
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            parameter.copy_(parameter.bfloat16().float())
    transformers.utils.logging.disable_progress_bar()
    copy.deepcopy(drawn).to(torch.bfloat16).save_pretrained(folder)  # rounds buffers, too
    write_tokenizer(folder, TOKENS, TEMPLATE)
    bounds = {} if name == "Llava" else PROCESSOR
    (folder / "preprocessor_config.json").write_text(json.dumps(bounds))
    return VisionFamily(folder, drawn.eval())


def _config(name: str, wide: bool) -> Any:
    hidden, head = (256, 64) if wide else (32, 8)
    text = {
        "vocab_size": 320 if wide else 264,  # as kernels take it
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    tower = {
        "hidden_size": 144 if wide else 24,
        "intermediate_size": 100 if wide else 20,
    }  # heads of 72
    if name == "Llava":
        clip = {"num_attention_heads": 2, "num_hidden_layers": 3}
        sizes = {"image_size": _SIDE, "patch_size": _PATCH}
        return transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**text),
            vision_config=transformers.CLIPVisionConfig(**tower, **clip, **sizes),
            image_token_index=IMAGE_ID,
        )
    half = head // 2
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    tower |= {"depth": 3, "num_heads": 2, "patch_size": _PATCH, "out_hidden_size": hidden}
    if name == "Qwen2_5_VL":
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        tower |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
        rope |= {"mrope_interleaved": True}
        text |= {"head_dim": head}
    if name == "Qwen3VLMoe":
        width = 128 if wide else 20
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    kind = getattr(transformers, f"{name}Config")
    return kind(
        text_config={**text, "rope_parameters": rope},
        vision_config=tower,
        tie_word_embeddings=False,
        **_IDS,
    )
