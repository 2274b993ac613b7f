"""Parser of PEFT tensor names: pairs of matrices, and sites of the base model.

PEFT writes `base_model.model.<module path>.lora_A.weight` and `.lora_B.weight`; shared-outer
expert files leave out `.weight`.
"""

import dataclasses
import re

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.formats.safetensors_file import AdapterTensor

KV_B = ("kv_b_proj.k", "kv_b_proj.v")
LORA_NAME = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])(?:\.weight)?")
# PEFT saves the whole base layer beside LoRA on an embedding or head.
_STRAY = re.compile(r"(?P<head>base_model\.model\.(?:.+\.)?lm_head)\.base_layer\.(?:weight|bias)")
_REFUSED = (
    (
        re.compile(r"\.lora_embedding_[AB]"),
        "LoRA on an embedding is not supported; "
        "train without embed_tokens, or list it in modules_to_save or trainable_token_indices",
    ),
    (re.compile(r"\.lora_magnitude_vector"), "DoRA magnitudes are not supported"),
    (re.compile(r"\.lora_[AB]\.bias$"), "a bias of lora_A or lora_B is not supported"),
    (re.compile(r"\.trainable_tokens_"), "trained embedding rows are not supported"),
    (
        re.compile(r"\.(embed_tokens|wte|lm_head)(\.modules_to_save)?\.(weight|bias)$"),
        "a whole embedding or head was saved; only LoRA on it is supported",
    ),
)
_LISTED = 6


@dataclasses.dataclass(frozen=True, eq=False)
class LoraPair:
    """A and B of one module path, as stored."""

    path: str
    a: AdapterTensor
    b: AdapterTensor


@dataclasses.dataclass(frozen=True)
class Target:
    """Meaning of a module path: one module, or several whose rows follow in B."""

    path: str
    modules: tuple[LoraModule, ...]
    layer: int
    expert: int | None = None

    @property
    def is_kv_b(self) -> bool:
        """True if it is MLA's kv_b_proj, which a step applies absorbed."""
        return self.modules[0].name in KV_B

    @property
    def is_all_experts(self) -> bool:
        """True if the path names a module of every expert at once."""
        return self.expert is None and self.modules[0].num_experts > 0 and not self.is_kv_b


def pair_up(tensors: dict[str, AdapterTensor]) -> dict[str, LoraPair]:
    """Return A and B by module path; every tensor is used or ValueError lists it."""
    sides: dict[str, dict[str, AdapterTensor]] = {"A": {}, "B": {}}
    orphans = []
    for name, tensor in tensors.items():
        _refuse(name)
        match = LORA_NAME.fullmatch(name)
        if match is None:
            orphans.append(name)
        elif match["path"] in sides[match["side"]]:
            raise ValueError(f"{name} stands twice, with and without '.weight'.")
        else:
            sides[match["side"]][match["path"]] = tensor
    _check_complete(sides["A"], sides["B"])
    orphans = [name for name in orphans if not _is_stray(name, sides["A"])]
    if orphans:
        raise ValueError(f"{_list(orphans)} not a LoRA matrix of a module, and would be lost.")
    return {path: LoraPair(path, sides["A"][path], sides["B"][path]) for path in sides["A"]}


def _refuse(name: str) -> None:
    for pattern, why in _REFUSED:
        if pattern.search(name):
            raise ValueError(f"{name}: {why}.")


def _check_complete(a: dict[str, AdapterTensor], b: dict[str, AdapterTensor]) -> None:
    for have, other, side in ((a, b, "lora_B"), (b, a, "lora_A")):
        missing = sorted(have.keys() - other.keys())
        if missing:
            raise ValueError(f"{_list([have[p].name for p in missing])} without its {side}.")


def _is_stray(name: str, a: dict[str, AdapterTensor]) -> bool:
    """Return whether PEFT wrote this copy of the base beside LoRA on the head."""
    match = _STRAY.fullmatch(name)
    return match is not None and match["head"].removeprefix("base_model.model.") in a


def _list(names: list[str]) -> str:
    """Return 'x is' or 'x, y and 3 more are'."""
    shown, more = ", ".join(names[:_LISTED]), len(names) - _LISTED
    if more > 0:
        return f"{shown} and {more} more are"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def find_target(path: str, catalogue: LoraCatalogue) -> Target | None:
    """Return what the path stands for, None when no rule knows it; ValueError when refused."""
    for rule in catalogue.rules:
        match = rule.pattern.fullmatch(path)
        if match is None:
            continue
        names = rule.split or ((rule.module,) if rule.module else ())
        if not names:
            raise ValueError(f"{path}: {rule.why or 'LoRA on it is not supported.'}")
        if set(names) & {"kv_b_proj", *KV_B}:
            names = KV_B
        groups = match.groupdict()
        layer = int(groups.get("layer") or 0)
        expert = int(groups["expert"]) if groups.get("expert") is not None else None
        missing = [name for name in names if name not in catalogue.modules]
        if missing:
            raise ValueError(f"{path}: the base model has no {missing[0]}.")
        modules = tuple(catalogue.modules[name] for name in names)
        _check_place(path, modules, layer, expert)
        return Target(path, modules, layer, expert)
    return None


def _check_place(
    path: str, modules: tuple[LoraModule, ...], layer: int, expert: int | None
) -> None:
    for module in modules:
        if layer not in module.layers:
            raise ValueError(
                f"{path}: the base model has no {module.name} in layer {layer}; "
                f"its last one is in layer {max(module.layers)}."
            )
        if expert is not None and expert >= module.num_experts:
            raise ValueError(f"{path}: the base model has {module.num_experts} experts.")
