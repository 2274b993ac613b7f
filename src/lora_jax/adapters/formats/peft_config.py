"""adapter_config.json of PEFT: what we apply, what may stand there, what we refuse by name.

A key is either metadata, or applied (r, lora_alpha, use_rslora, the patterns), or brings what not
every reader takes (use_dora, lora_bias, bias, trainable_token_indices, modules_to_save of the
embedding and the head), or must have its default value. A key we do not know
must be null: it could change what the adapter means.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from lora_jax import strict_json
from lora_jax.adapters.formats.peft_pattern import Budget, Pattern, PatternRefused
from lora_jax.adapters.vocabulary import EMBEDDING, PARTS

# Says nothing about what the tensors do: training, bookkeeping, or which tensors exist.
_METADATA = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules"),
        *("fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "target_modules", "task_type"),
    )
)
# Of these nothing is kept; the others of _METADATA are told of an adapter.
_SILENT = _METADATA - {"base_model_name_or_path", "peft_version", "target_modules"}
_APPLIED = frozenset(
    (
        *("alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"),
        *("target_parameters", "use_rslora"),
    )
)
# A classifier's last layer in transformers; PEFT lists both names, whichever the model has.
HEAD_NAMES = ("score", "classifier")
# key -> (its harmless value besides null, what it would mean)
_REFUSED: dict[str, tuple[Any, str]] = {
    "alora_invocation_tokens": ([], "aLoRA: the adapter acts only after an invocation"),
    "arrow_config": (None, "Arrow: the adapter is routed between several"),
    "bias": ("none", "biases of the base model were trained"),
    "corda_config": (None, "CorDA: the base weights were changed"),
    "enable_lora": (None, "old-style fused LoRA"),
    "ensure_weight_tying": (False, "the adapter is tied to the embedding"),
    "kasa_config": (None, "KaSA: the base weights were changed"),
    "layer_replication": (None, "layers of the base model are repeated"),
    "lora_bias": (False, "lora_B has a bias"),
    "lora_ga_config": (None, "LoRA-GA: the base weights were changed"),
    "megatron_config": (None, "Megatron parallel layers"),
    "merge_weights": (False, "the base weights hold the adapter"),
    "modules_to_save": ([], "whole modules were trained and saved"),
    "monteclora_config": (None, "MonteCLoRA: the adapter is sampled"),
    "trainable_token_indices": (None, "embedding rows were trained"),
    "use_bdlora": (False, "BD-LoRA: block-diagonal matrices"),
    "use_dora": (False, "DoRA: magnitudes were trained"),
    "use_qalora": (False, "QALoRA: inputs are pooled"),
    "velora_config": (None, "VeLoRA"),
}
# These leave the base weights alone and mean plain B A afterwards.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_BIASES = ("none", "all", "lora_only")
_MAX_CONFIG_MATCHES = 1_000_000  # patterns x modules; real files stay below 10^5
_MAX_PATTERNS = 1000
_MAX_VALUES = 1 << 17  # JSON values of the file


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """The part of adapter_config.json that decides what the tensors mean."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: tuple[str, ...]  # where they are a list; tensors say what they are of
    target_parameters: tuple[str, ...]
    base_model: str | None
    peft_version: str | None
    use_dora: bool = False
    lora_bias: bool = False
    has_bias: bool = False  # biases of the base were trained
    # Of PARTS of the vocabulary: tokens whose rows were trained, and those that were saved whole.
    token_ids: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    saved: tuple[str, ...] = ()
    ties_weights: bool = False  # a tied head follows a saved embedding
    meaning: str = ""  # the same in two files only if all fields above are

    @property
    def has_gains(self) -> bool:
        """True if outputs are scaled or shifted beside LoRA."""
        return self.use_dora or self.lora_bias or self.has_bias

    def rank_of(self, key: str) -> int:
        """Return the rank of a module or parameter: the first matching pattern, else r."""
        return next((r for pattern, r in self.rank_pattern if pattern.match(key)), self.rank)

    def scaling_of(self, key: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA, with alpha by pattern."""
        alphas = (a for pattern, a in self.alpha_pattern if pattern.match(key))
        alpha = next(alphas, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, parameter: str) -> bool:
        """Return whether target_parameters names this parameter, by PEFT's suffix rule."""
        return any(parameter == t or parameter.endswith(f".{t}") for t in self.target_parameters)

    def check_size(self, num_modules: int) -> None:
        """Raise ValueError when matching the patterns against all modules would take too long."""
        patterns = len(self.rank_pattern) + len(self.alpha_pattern)
        if patterns * num_modules > _MAX_CONFIG_MATCHES:
            raise ValueError(f"{patterns} patterns for {num_modules} modules are too many.")


def parse(data: bytes, *, has_head: bool = False, brings: bool = False) -> PeftConfig:
    """Return the config; ValueError naming the key that is wrong or not supported.

    `has_head`: the folder has a task head, so that modules_to_save may name it. `brings`: the
    caller takes adapters with more than LoRA.
    """
    config = strict_json.read_object(data, _MAX_VALUES)
    meaning = _meaning(config)
    more = _take_more(config) if brings else {}
    if has_head and isinstance(saved := config.get("modules_to_save"), list):
        config["modules_to_save"] = [name for name in saved if name not in HEAD_NAMES]
    _check_keys(config)
    return PeftConfig(
        rank=_positive_int(config, "r"),
        alpha=_number(config.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=_bool(config, "use_rslora"),
        rank_pattern=_patterns(config, "rank_pattern", _rank),
        alpha_pattern=_patterns(config, "alpha_pattern", _number),
        target_modules=_target_modules(config),
        target_parameters=_strings(config, "target_parameters"),
        base_model=_base_model(config),
        peft_version=_text(config, "peft_version"),
        meaning=meaning,
        **more,
    )


def _meaning(config: dict[str, Any]) -> str:
    """Return all of a config that decides what `parse` returns, as a text."""
    # Within a value order may matter: the first pattern that matches counts.
    return json.dumps(sorted((k, v) for k, v in config.items() if k not in _SILENT))


def _take_more(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the adapter has beside LoRA, and take its keys out of the config."""
    bias = config.pop("bias", "none")
    if bias not in (None, *_BIASES):
        raise ValueError(f"bias is {_short(bias)}; {', '.join(_BIASES)} are known.")
    flags = {key: _bool(config, key) for key in ("use_dora", "lora_bias")}
    for key in flags:
        config.pop(key, None)
    if all(flags.values()):
        raise ValueError("use_dora and lora_bias together have no meaning in PEFT.")
    more = {"token_ids": _take_token_ids(config), "saved": _take_saved(config)}
    if more["token_ids"] or more["saved"]:
        more["ties_weights"] = _bool(config, "ensure_weight_tying")
        config.pop("ensure_weight_tying", None)
    return flags | {"has_bias": bias not in (None, _BIASES[0])} | more


def _take_token_ids(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return trainable_token_indices by module of the vocabulary, and take the key out."""
    key = "trainable_token_indices"
    given = config.pop(key, None)
    if given is None:
        return {}
    by_module = given if isinstance(given, dict) else {EMBEDDING: given}
    ids_of: dict[str, tuple[int, ...]] = {}
    for path, ids in by_module.items():
        name = path.rpartition(".")[2]
        if name not in PARTS or name in ids_of:
            raise ValueError(f"{key} names {_short(path)}; {' and '.join(PARTS)} are served.")
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"{key} of {name} is {_short(ids)}, not a list of token ids.")
        if len(set(ids)) < len(ids):
            raise ValueError(f"{key} of {name} has a token twice.")
        ids_of[name] = tuple(ids)
    return ids_of


def _take_saved(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the modules of the vocabulary that were saved whole, and take them out."""
    saved = config.get("modules_to_save")
    if not isinstance(saved, list):
        return ()
    names = {name: name.rpartition(".")[2] for name in saved if isinstance(name, str)}
    config["modules_to_save"] = [n for n in saved if names.get(n) not in PARTS]
    return tuple(name for name in PARTS if name in names.values())


def _target_modules(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("target_modules")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _check_keys(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type is {_short(kind)}; only LORA is served.")
    init = config.get("init_lora_weights")
    if not any(type(init) is type(allowed) and init == allowed for allowed in _INITS):
        raise ValueError(
            f"init_lora_weights is {_short(init)}: it changes the base weights or is not known, "
            "so the adapter does not belong to the plain base model."
        )
    for key, value in config.items():
        if value is None or key in _METADATA or key in _APPLIED:
            continue
        if key not in _REFUSED:
            raise ValueError(f"the key {key[:80]!r} = {_short(value)} is not known.")
        harmless, meaning = _REFUSED[key]
        if key == "modules_to_save" and set(HEAD_NAMES) & set(map(str, value)):
            meaning = "a task head needs a task_head.json beside it, with kind and labels"
        if type(value) is not type(harmless) or value != harmless:
            raise ValueError(f"{key} = {_short(value)} is not supported ({meaning}).")


def _short(value: Any) -> str:
    if isinstance(value, list | dict | str) and len(value) > 80:
        return f"a {type(value).__name__} of {len(value)}"
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _rank(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError(f"{what} is {_short(value)}, not a positive integer.")
    return value


def _positive_int(config: dict[str, Any], key: str) -> int:
    return _rank(config.get(key), key)


def _number(value: Any, what: str) -> float:
    """Return a finite number of a size that float32 scales can hold."""
    if type(value) not in (int, float) or not abs(value) <= 1e6:  # NaN is not, either
        raise ValueError(f"{what} is {_short(value)}, not a finite number up to 1e6.")
    return float(value)


def _bool(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{key} is {_short(value)}, not true or false.")
    return bool(value)


def _text(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, str) or len(value) > 512):
        raise ValueError(f"{key} is {_short(value)}, not a short string.")
    return value


def _base_model(config: dict[str, Any]) -> str | None:
    """Return the base model's name; of a path on somebody's machine only the last part."""
    name = _text(config, "base_model_name_or_path")
    return PurePosixPath(name).name if name and name.startswith("/") else name or None


def _strings(config: dict[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise ValueError(f"{key} is {_short(value)}, not a list of names.")
    return tuple(value)


def _patterns(config: dict[str, Any], key: str, convert: Any) -> tuple[Any, ...]:
    """Return (compiled pattern, value) in the file's order, which decides among matches."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {_short(value)}, not an object of patterns.")
    if len(value) > _MAX_PATTERNS:
        raise ValueError(f"{key} holds {len(value)} patterns; at most {_MAX_PATTERNS} are read.")
    budget = Budget()
    return tuple(
        (_compile(pattern, key, budget), convert(v, f"{key}[{_short(pattern)}]"))
        for pattern, v in value.items()
    )


def _compile(pattern: str, key: str, budget: Budget) -> Pattern:
    try:
        return Pattern(pattern, budget)
    except PatternRefused as error:
        raise ValueError(
            f"{key} holds the pattern {_short(pattern)}, which is not supported: {error}."
        ) from None
