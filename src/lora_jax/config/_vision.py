"""Vision towers as config.json spells them: nested sections, or Qwen2.5-VL's flat file."""

from collections.abc import Callable, Mapping
from typing import Any

from lora_jax.config._keys import Keys
from lora_jax.config._types import VisionConfig

# Models with images that are refused, and why.
REFUSED = {
    "qwen": "Qwen-VL is custom code with .bin files; use Qwen2.5-VL or Qwen3-VL",
    "qwen2_vl": "only its successors Qwen2.5-VL and Qwen3-VL are",
    "gemma3": "its attention looks both ways inside an image",
    "gemma4": "its attention looks both ways inside an image",
    "llava_next": "images in tiles of several resolutions are not",
    "llava_onevision": "images in tiles of several resolutions are not",
    "internvl": "images in tiles of several resolutions are not",
    "qwen3_5": "linear attention is not",
}

# What old files leave to transformers' classes.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_OUTER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")


def text_keys(keys: Keys) -> Keys:
    """Return the language model's part of a config, whichever level it stands on."""
    raw = dict(keys.raw)
    if raw.get("text_config") is None:
        raw.pop("vision_config", None)
        return Keys(raw, keys.where)
    text = dict(keys.section("text_config").raw)
    for name in _OUTER:
        if text.get(name) is None and raw.get(name) is not None:
            text[name] = raw[name]
    if raw.get("tie_word_embeddings") is not None:  # the outer one is what transformers obeys
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    if keys.where == "llava":
        Keys(text, keys.where).only("model_type", "llama")
        text = {**_LLAMA_DEFAULTS, **text}
    return Keys(text, keys.where)


def without_sections(keys: Keys) -> tuple[Keys, Keys]:
    """Return a language model's part without M-RoPE's keys, and the section that has them."""
    name = "rope_parameters" if keys.raw.get("rope_parameters") else "rope_scaling"
    section = keys.section(name)
    rest = {key: value for key, value in section.raw.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if rest.get(key) == "mrope":
            rest[key] = "default"
    return Keys({**keys.raw, name: rest}, keys.where), section


def section_fields(section: Keys, dim: int) -> dict[str, Any]:
    """Return RopeConfig's fields of M-RoPE, none where a config has no sections.

    Raises ValueError unless the three sizes of the sections sum to half of `dim`.
    """
    sizes = section.get("mrope_section", default=None)
    if sizes is None:
        return {}
    wrong = not isinstance(sizes, list | tuple) or len(sizes) != 3 or sum(sizes) * 2 != dim
    if wrong or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"{section.where}: mrope_section {sizes!r} must be three sizes that sum to {dim // 2}."
        )
    return {"sections": tuple(sizes), "interleaved_sections": section.flag("mrope_interleaved")}


def read_vision(keys: Keys, hidden: int) -> VisionConfig:
    """Return the tower of a config whose language model has width `hidden`.

    Raises ValueError naming what the config lacks, or the key whose value is not supported.
    """
    section = keys.section("vision_config")
    if not section.raw:
        raise ValueError(f"{keys.where}: config lacks vision_config.")
    return _FAMILIES[keys.where](keys, section, hidden)


def _token(keys: Keys, default: int) -> int:
    return keys.size("image_token_id", "image_token_index", default=default)


def _qwen_fields(keys: Keys, section: Keys, hidden: int, defaults: Mapping[str, Any]) -> dict:
    """Return what Qwen2.5-VL's and Qwen3-VL's towers share."""
    out = section.size("out_hidden_size", default=hidden)
    if out != hidden:
        raise ValueError(
            f"{section.where}: out_hidden_size is {out}, the language model's width {hidden}."
        )
    for name in ("in_channels", "in_chans"):
        section.only(name, 3)
    return {
        "num_layers": section.size("depth", default=defaults["depth"]),
        "hidden_size": section.size("hidden_size", default=defaults["hidden_size"]),
        "num_heads": section.size("num_heads", default=16),
        "intermediate_size": section.size("intermediate_size", default=defaults["width"]),
        "patch_size": section.size("patch_size", default=defaults["patch_size"]),
        "temporal_patch_size": section.size("temporal_patch_size", default=2),
        "merge_size": section.size("spatial_merge_size", default=2),
        "out_size": hidden,
        "norm_eps": 1e-6,
        "image_token_id": _token(keys, 151655),
    }


def _qwen3_vl(keys: Keys, section: Keys, hidden: int) -> VisionConfig:
    section.only("hidden_act", "gelu_pytorch_tanh")
    sizes = {"depth": 27, "hidden_size": 1152, "width": 4304, "patch_size": 16}
    fields = _qwen_fields(keys, section, hidden, sizes)
    positions = section.size("num_position_embeddings", default=2304)
    side = round(positions**0.5)
    if side * side != positions:
        raise ValueError(f"{section.where}: num_position_embeddings {positions} is no square.")
    deepstack = tuple(section.get("deepstack_visual_indexes", default=(8, 16, 24)))
    _check_layers(section, "deepstack_visual_indexes", deepstack, fields["num_layers"])
    return VisionConfig("qwen3_vl", **fields, num_positions=positions, deepstack=deepstack)


def _qwen2_5_vl(keys: Keys, section: Keys, hidden: int) -> VisionConfig:
    section.only("hidden_act", "silu")
    sizes = {"depth": 32, "hidden_size": 1280, "width": 3420, "patch_size": 14}
    fields = _qwen_fields(keys, section, hidden, sizes)
    window = section.size("window_size", default=112)
    cell = fields["patch_size"] * fields["merge_size"]
    if window < cell:
        raise ValueError(f"{section.where}: window_size {window} is less than a cell of {cell}.")
    full = tuple(section.get("fullatt_block_indexes", default=(7, 15, 23, 31)))
    _check_layers(section, "fullatt_block_indexes", full, fields["num_layers"])
    return VisionConfig("qwen2_5_vl", **fields, window_size=window, full_layers=full)


def _check_layers(section: Keys, name: str, layers: tuple[Any, ...], count: int) -> None:
    ascending = all(isinstance(n, int) for n in layers) and list(layers) == sorted(set(layers))
    if not ascending or any(not 0 <= n < count for n in layers):
        raise ValueError(
            f"{section.where}: {name} {list(layers)!r} must be ascending layers below {count}."
        )


def _llava(keys: Keys, section: Keys, hidden: int) -> VisionConfig:
    """Return LLaVA-1.5's CLIP tower: all layers but the last, the class row dropped."""
    section.only("model_type", "clip_vision_model")
    section.only("hidden_act", "quick_gelu")
    keys.only("vision_feature_layer", -2)
    keys.only("vision_feature_select_strategy", "default")
    keys.only("projector_hidden_act", "gelu")
    if not keys.flag("multimodal_projector_bias", True):
        raise ValueError(f"{keys.where}: a projector without biases is not supported.")
    patch = section.size("patch_size", default=14)
    side = section.size("image_size", default=336)
    if side % patch:
        raise ValueError(f"{section.where}: image_size {side} is no multiple of {patch}.")
    return VisionConfig(
        "clip",
        num_layers=section.size("num_hidden_layers", default=24) - 1,
        hidden_size=section.size("hidden_size", default=1024),
        num_heads=section.size("num_attention_heads", default=16),
        intermediate_size=section.size("intermediate_size", default=4096),
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=1,
        out_size=hidden,
        norm_eps=section.number("layer_norm_eps", default=1e-5),
        image_token_id=_token(keys, 32000),
        num_positions=(side // patch) ** 2 + 1,
        image_size=side,
    )


_FAMILIES: dict[str, Callable[[Keys, Keys, int], VisionConfig]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
}
