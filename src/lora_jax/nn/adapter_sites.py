"""Building blocks of a model's LoRA catalogue: the usual modules and their spellings in files."""

import re
from collections.abc import Iterable

from lora_jax.adapters.catalogue import WHOLE, LoraModule, NameRule
from lora_jax.config import ModelConfig, MoeConfig

_EMBEDDING = "adapters on the token embedding are not supported"


def rule(template: str, *modules: str) -> NameRule:
    """Return the rule of a path such as "model.layers.{layer}.mlp.experts.{expert}.gate_proj".

    {layer} and {expert} are numbers; the rest is a regular expression in which a dot is a dot.
    Several modules: the path is fused of them, in that order.
    """
    pattern = template.replace(".", r"\.")
    for name in ("layer", "expert"):
        pattern = pattern.replace(f"{{{name}}}", rf"(?P<{name}>\d+)")
    if len(modules) == 1:
        return NameRule(re.compile(pattern), module=modules[0])
    return NameRule(re.compile(pattern), split=modules)


def refusal(template: str, why: str) -> NameRule:
    """Return a rule that refuses a path, saying why."""
    return NameRule(re.compile(template.replace(".", r"\.")), why=why)


def by_name(modules: Iterable[LoraModule]) -> dict[str, LoraModule]:
    """Return the modules of a catalogue keyed by name."""
    return {module.name: module for module in modules}


def head_modules(config: ModelConfig) -> list[LoraModule]:
    """Return lm_head, which counts as a module of layer 0."""
    return [LoraModule("lm_head", config.hidden_size, config.vocab_size, (0,))]


def head_rules(embedding: str = "model.embed_tokens") -> tuple[NameRule, ...]:
    """Return the spelling of the head, and the refusal of the embedding."""
    return rule("lm_head", "lm_head"), refusal(embedding, _EMBEDDING)


def attention_modules(config: ModelConfig) -> list[LoraModule]:
    """Return q, k, v and o of grouped-query attention in every layer."""
    hidden, layers = config.hidden_size, tuple(range(config.num_layers))
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        LoraModule("q_proj", hidden, q_size, layers),
        LoraModule("k_proj", hidden, kv_size, layers),
        LoraModule("v_proj", hidden, kv_size, layers),
        LoraModule("o_proj", q_size, hidden, layers),
    ]


def attention_rules(names: Iterable[str] = ("q_proj", "k_proj", "v_proj", "o_proj")):
    """Return the spellings of attention's linear maps."""
    return tuple(rule(f"model.layers.{{layer}}.self_attn.{name}", name) for name in names)


def mlp_modules(
    hidden: int, width: int, layers: tuple[int, ...], prefix: str = "", num_experts: int = 0
) -> list[LoraModule]:
    """Return gate, up and down of a gated MLP, or of one per expert; none without layers."""
    shapes = (
        ("gate_proj", hidden, width),
        ("up_proj", hidden, width),
        ("down_proj", width, hidden),
    )
    if not layers:
        return []
    return [LoraModule(prefix + n, i, o, layers, num_experts) for n, i, o in shapes]


def mlp_rules(prefix: str = "") -> tuple[NameRule, ...]:
    """Return the spellings of a dense MLP, `prefix` being also its place below `mlp`."""
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(rule(f"model.layers.{{layer}}.mlp.{prefix}{n}", prefix + n) for n in names)


def moe_modules(hidden: int, moe: MoeConfig) -> list[LoraModule]:
    """Return router, experts and the shared MLP of the MoE layers; none without layers."""
    if not moe.layers:
        return []
    width, experts = moe.intermediate_size, moe.num_experts
    modules = [LoraModule("router", hidden, experts, moe.layers, split=WHOLE)]
    modules += mlp_modules(hidden, width, moe.layers, "experts.", experts)
    if moe.shared_size:
        modules += mlp_modules(hidden, moe.shared_size, moe.layers, "shared_experts.")
    return modules


def moe_rules(block: str, router: str = "gate") -> tuple[NameRule, ...]:
    """Return the spellings of router and experts; fused experts are found through these.

    `block` is the regular expression of the MoE block's name, e.g. "(?:mlp|block_sparse_moe)".
    """
    at = f"model.layers.{{layer}}.{block}"
    return (
        rule(f"{at}.{router}", "router"),
        rule(f"{at}.experts.{{expert}}.(?:gate_proj|w1)", "experts.gate_proj"),
        rule(f"{at}.experts.{{expert}}.(?:up_proj|w3)", "experts.up_proj"),
        rule(f"{at}.experts.{{expert}}.(?:down_proj|w2)", "experts.down_proj"),
    )
