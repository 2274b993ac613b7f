"""Modules of a base model that adapters may change, by the names that PEFT's configs give. No jax.

A module that no adapter of an engine may change leaves no trace of LoRA in its programs and no room
in its pools of rank rows: vLLM's --lora-target-modules.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lora_jax.adapters.catalogue import EXPERT_MODULES, LoraCatalogue
from lora_jax.adapters.formats.esft_format import CONFIG_FILE as ESFT_FILE
from lora_jax.adapters.formats.peft_config import HEAD_NAMES
from lora_jax.adapters.formats.peft_experts import container_of, find_shared
from lora_jax.adapters.formats.peft_format import WEIGHTS_FILE
from lora_jax.adapters.formats.peft_names import KV_B, LORA_NAME, find_target
from lora_jax.adapters.formats.safetensors_file import header_text, names_in

_MAX_CONFIG_BYTES = 1 << 20
# vLLM's names of maps that it computes as one.
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ALL = ("all", "all-linear")  # SGLang's word, and PEFT's
_NUMBER = re.compile(r"\d+")
_GROUP_NAME = re.compile(r"\?P<\w+>")
# Parameters of stacked experts, and the modules that they are here.
_OF_EXPERTS = {"gate_up_proj": EXPERT_MODULES[:2], "down_proj": EXPERT_MODULES[2:]}
_ALL_BIASES = "all"  # value of PEFT's bias: those of modules without LoRA are trained, too


def modules_named(names: Iterable[str], catalogue: LoraCatalogue) -> frozenset[str]:
    """Return the modules that `names` stand for, each as an item of PEFT's target_modules.

    "gate_proj" stands for every module whose path in files ends with it, "mlp.gate" for the router;
    a module's own name, such as "experts.down_proj", for that one; vLLM's "qkv_proj" and
    "gate_up_proj" for the maps that are one there; "all" for every module. Raises ValueError for a
    name of no module, listing the others.
    """
    found: set[str] = set()
    for name in names:
        spellings = (name, *_PACKED.get(name, ()))
        modules = frozenset().union(*(_modules_of(one, catalogue) for one in spellings))
        modules |= catalogue.modules.keys() if name in _ALL else frozenset()
        if not modules:
            known = ", ".join(sorted(spelled(catalogue)))
            raise ValueError(
                f"{name!r} is no module of {catalogue.model_type} that adapters may change. Those "
                f"are {known}."
            )
        found |= modules
    return frozenset(found)


def modules_changed(
    folders: Iterable[str | os.PathLike[str]], catalogue: LoraCatalogue
) -> frozenset[str] | None:
    """Return the modules that the adapters' configs and the names of their tensors tell.

    None where a config does not say it plainly: a pattern in place of a list, a name that is no
    module's, whole matrices beside LoRA, biases of all modules, a config that cannot be read:
    loading it tells what is wrong. ESFT adapters and task heads change none.
    """
    found: set[str] = set()
    for folder in folders:
        if (names := _targets_of(Path(folder))) is None:
            return None
        named: set[str] = set()
        for name in names:
            if not (modules := _modules_of(name, catalogue)):
                return None
            named |= modules
        found |= named | _in_file(Path(folder), catalogue, named)
    return frozenset(found)


def check_open(sites: Iterable[tuple[str, int]], catalogue: LoraCatalogue) -> None:
    """Raise ValueError for changed modules (with their layers) that the catalogue has closed."""
    closed = sorted({name for name, _ in sites} & catalogue.closed.keys())
    if closed:
        names = ", ".join(closed)
        raise ValueError(
            f"the adapter changes {names}, for which this engine has no room: name {names} in "
            "--lora-target-modules (lora_target_modules), too."
        )


def spelled(catalogue: LoraCatalogue) -> dict[str, frozenset[str]]:
    """Return the last names of paths in files, such as "q_proj", and the modules of each."""
    found: dict[str, set[str]] = {}
    for tail, modules in _tails(catalogue):
        for name in _words(tail[-1]):
            found.setdefault(name, set()).update(modules)
    return {name: frozenset(modules) for name, modules in found.items()}


def _modules_of(name: str, catalogue: LoraCatalogue) -> frozenset[str]:
    parts = name.split(".")
    found = {name} & catalogue.modules.keys()
    for tail, modules in _tails(catalogue):
        if len(parts) <= len(tail) and re.fullmatch(r"\.".join(tail[-len(parts) :]), name):
            found |= modules
    return frozenset(found)


def _tails(catalogue: LoraCatalogue) -> list[tuple[list[str], frozenset[str]]]:
    """Return each spelling cut at its dots, and the modules of the catalogue that it stands for."""
    tails = []
    for rule in catalogue.rules:
        names = set(rule.split or ((rule.module,) if rule.module else ()))
        if names & {"kv_b_proj", *KV_B}:
            names = set(KV_B)
        names &= catalogue.modules.keys()
        if names:
            pattern = _GROUP_NAME.sub("?:", rule.pattern.pattern)
            tails.append((_cut(pattern), frozenset(names)))
    return tails


def _cut(pattern: str) -> list[str]:
    """Return the parts of a path's regular expression, cut at the dots outside of groups."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(pattern):
        depth += (character == "(") - (character == ")")
        if depth == 0 and pattern.startswith(r"\.", at):
            parts.append(pattern[begin:at])
            begin = at + 2
    return [*parts, pattern[begin:]]


def _words(part: str) -> list[str]:
    """Return the names that a part such as "(?:gate_proj|w1)" matches; none for other patterns."""
    inner = part.removeprefix("(?:").removesuffix(")") if part.startswith("(?:") else part
    return [word for word in inner.split("|") if re.fullmatch(r"\w+", word)]


def _targets_of(folder: Path) -> list[str] | None:
    """Return target_modules of an adapter of plain LoRA; None where that does not say all."""
    if (folder / ESFT_FILE).is_file():
        return []
    try:
        with (folder / "adapter_config.json").open("rb") as content:
            found: Any = json.loads(content.read(_MAX_CONFIG_BYTES))
        targets, saved = found["target_modules"] or [], found.get("modules_to_save") or ()
        more = found.get("trainable_token_indices") or found.get("bias") == _ALL_BIASES
        if more or not set(saved) <= set(HEAD_NAMES) or not isinstance(targets, list):
            return None
        targets = targets + _of_parameters(found.get("target_parameters") or ())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return targets if targets and all(isinstance(name, str) for name in targets) else None


def _in_file(folder: Path, catalogue: LoraCatalogue, named: set[str]) -> set[str]:
    """Return the modules of the tensors in an adapter's file: some configs name fewer.

    `named` are those that its own config names. The load tells what is wrong with tensors of no
    module.
    """
    found, experts = set[str](), set(EXPERT_MODULES)
    with contextlib.suppress(OSError, ValueError):
        for path in _paths_in(header_text(folder / WEIGHTS_FILE)):
            if (container := container_of(path)) is not None:
                # One pair of matrices is of what the config says, a nested one beside it of both.
                found |= (not container[1] and named & experts) or experts
                continue
            with contextlib.suppress(ValueError):
                target = find_target(path, catalogue) or find_shared(path, catalogue)
                found |= {module.name for module in target.modules} if target else set()
    return found & catalogue.modules.keys()


@functools.lru_cache(8)  # adapters that were trained alike have the same header
def _paths_in(header: bytes) -> tuple[str, ...]:
    """Return paths of modules with LoRA in a file, one of those that differ in numbers alone."""
    matches = map(LORA_NAME.fullmatch, names_in(header))
    paths = (match["path"] for match in matches if match)
    return tuple({_NUMBER.sub("0", path): path for path in paths}.values())


def _of_parameters(names: Iterable[str]) -> list[str]:
    """Return the modules of target_parameters; LookupError for others than those of experts."""
    found: list[str] = []
    for name in names:
        *_, owner, leaf = name.split(".")
        found += _OF_EXPERTS[leaf if owner == "experts" else name]
    return found
