"""Catalogues of tiny base models, adapters made by hand, and the deltas that adapters stand for."""

import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule, NameRule
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import (
    AdapterReport,
    AdapterWeights,
    SiteWeights,
)

FIXTURES = Path(__file__).parents[2] / "fixtures" / "peft"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
HEADS, NOPE, V_DIM, LATENT = 2, 4, 6, 8  # of the MLA fixture


def rule(path: str, *modules: str, why: str = "") -> NameRule:
    """Return a rule; {l} and {e} in the path stand for a layer and an expert number."""
    pattern = path.replace(".", r"\.").replace("{l}", r"(?P<layer>\d+)")
    pattern = re.compile(pattern.replace("{e}", r"(?P<expert>\d+)"))
    if len(modules) == 1:
        return NameRule(pattern, module=modules[0])
    return NameRule(pattern, split=modules, why=why)


def llama(hidden: int = 16, inner: int = 12, layers: int = 1, vocab: int = 20) -> LoraCatalogue:
    """Return the catalogue of a dense model with half as many kv heads as heads."""
    modules = _attention(hidden, layers) + _mlp("", hidden, inner, range(layers), 0)
    modules.append(LoraModule("lm_head", hidden, vocab, (0,)))
    rules = (*_attention_rules(), *_mlp_rules("mlp.", ""), rule("lm_head", "lm_head"))
    refused = rule("model.embed_tokens", why="adapters on the embedding are not supported")
    return _catalogue("llama", layers, modules, (*rules, refused))


def moe(
    kind: str = "mixtral",
    hidden: int = 16,
    inner: int = 12,
    experts: int = 3,
    layers: int = 1,
    router: str = "gate",
) -> LoraCatalogue:
    """Return the catalogue of a model whose every layer has experts."""
    modules = _attention(hidden, layers) + _mlp("experts.", hidden, inner, range(layers), experts)
    modules.append(LoraModule("router", hidden, experts, tuple(range(layers))))
    rules = (
        *_attention_rules(),
        *(
            rule(f"model.layers.{{l}}.{block}.{router}", "router")
            for block in ("mlp", "block_sparse_moe")
        ),
        *_expert_rules("(?:mlp|block_sparse_moe).experts.{e}."),
    )
    return _catalogue(kind, layers, modules, rules, interleaved_gate_up=kind == "gpt_oss")


def gpt_oss(hidden: int = 16, inner: int = 12) -> LoraCatalogue:
    """Return the catalogue of a tiny GPT-OSS: interleaved gate and up."""
    return moe("gpt_oss", hidden, inner, router="router")


def deepseek_v2() -> LoraCatalogue:
    """Return the catalogue of two layers of MLA: a dense one, one with experts and shared MLP."""
    both = (0, 1)
    modules = [
        LoraModule("q_a_proj", 16, 10, both),
        LoraModule("q_b_proj", 10, 12, both),
        LoraModule("kv_a_proj_with_mqa", 16, 10, both),
        LoraModule("kv_b_proj.k", NOPE, LATENT, both, HEADS),
        LoraModule("kv_b_proj.v", LATENT, V_DIM, both, HEADS),
        LoraModule("o_proj", 12, 16, both),
        LoraModule("router", 16, 3, (1,)),
        *_mlp("", 16, 26, (0,), 0),
        *_mlp("experts.", 16, 12, (1,), 3),
        *_mlp("shared_experts.", 16, 24, (1,), 0),
    ]
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    rules = (
        *(rule(f"model.layers.{{l}}.self_attn.{name}", name) for name in attention),
        rule("model.layers.{l}.self_attn.kv_b_proj", "kv_b_proj.k", "kv_b_proj.v"),
        rule("model.layers.{l}.mlp.gate", "router"),
        *_mlp_rules("mlp.", ""),
        *_mlp_rules("mlp.shared_experts.", "shared_experts."),
        *_expert_rules("mlp.experts.{e}."),
    )
    return _catalogue("deepseek_v2", 2, modules, rules, kv_b_heads=(HEADS, NOPE, V_DIM))


def dbrx() -> LoraCatalogue:
    """Return the catalogue of DBRX attention and router."""
    modules = [*_attention(16, 1), LoraModule("router", 16, 3, (0,))]
    block = "transformer.blocks.{l}"
    rules = (
        rule(f"{block}.norm_attn_norm.attn.Wqkv", "q_proj", "k_proj", "v_proj"),
        rule(f"{block}.norm_attn_norm.attn.out_proj", "o_proj"),
        rule(f"{block}.ffn.router.layer", "router"),
    )
    return _catalogue("dbrx", 1, modules, rules)


FOLDERS = sorted(path.name for path in FIXTURES.iterdir())


@functools.cache
def catalogue_of(folder: str) -> LoraCatalogue:
    """Return the catalogue of a fixture `<version>-<kind>-<variant>`."""
    version, kind, variant = folder.split("-")
    del version
    if kind == "gpt_oss":
        return gpt_oss(inner=16) if variant == "square" else gpt_oss()
    if kind in ("mixtral", "qwen3_moe"):
        return moe(kind, hidden=24) if variant == "square" else moe(kind)
    return {"llama": llama, "deepseek_v2": deepseek_v2, "dbrx": dbrx}[kind]()


def _catalogue(kind, layers, modules, rules, **more) -> LoraCatalogue:
    return LoraCatalogue(kind, layers, {module.name: module for module in modules}, rules, **more)


def _attention(hidden: int, layers: int) -> list[LoraModule]:
    sizes = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, hidden // 2),
        "v_proj": (hidden, hidden // 2),
        "o_proj": (hidden, hidden),
    }
    return [LoraModule(name, *size, tuple(range(layers))) for name, size in sizes.items()]


def _attention_rules():
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return tuple(rule(f"model.layers.{{l}}.self_attn.{name}", name) for name in names)


def _mlp(prefix, hidden, inner, layers, experts) -> list[LoraModule]:
    sizes = {
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    return [LoraModule(prefix + n, *size, tuple(layers), experts) for n, size in sizes.items()]


def _mlp_rules(path: str, prefix: str):
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(rule(f"model.layers.{{l}}.{path}{name}", prefix + name) for name in names)


def _expert_rules(path: str):
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return tuple(
        rule(f"model.layers.{{l}}.{path}(?:{name}|{short})", f"experts.{name}")
        for name, short in names.items()
    )


def site_delta(site: SiteWeights) -> np.ndarray:
    """Return scaling * B^T A per expert, float32 [experts or 1, d_out, d_in]."""
    a, b = site.a.astype(np.float32), site.b.astype(np.float32)
    return np.matmul(b.transpose(0, 2, 1), a) * np.float32(site.scaling)


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> Path:
    """Write a PEFT folder; tensor names get the usual prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def change_config(source: Path, target: Path, drop=(), **changes) -> Path:
    """Copy an adapter with keys of its config changed or dropped."""
    shutil.copytree(source, target)
    path = target / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    return target


def dense_tensors(
    names=("q_proj", "v_proj"), hidden: int = 16, layer: int = 0, rank: int = 2, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return random LoRA of attention modules, under their names in a Llama."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in names:
        d_out = hidden if name in ("q_proj", "o_proj") else hidden // 2
        path = f"model.layers.{layer}.self_attn.{name}"
        a, b = rng.normal(size=(rank, hidden)), rng.normal(size=(d_out, rank))
        tensors[f"{path}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{path}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def weights(
    catalogue: LoraCatalogue, rank: int, seed: int = 0, digest: str | None = None, names=None
) -> AdapterWeights:
    """Return random weights of one rank on every site (or on the modules `names`)."""
    rng = np.random.default_rng(seed)
    sites = {}
    for module in catalogue.modules.values():
        if names is not None and module.name not in names:
            continue
        lead = max(module.num_experts, 1)
        for layer in module.layers:
            a = rng.normal(size=(lead, rank, module.d_in)).astype(np.float32)
            b = rng.normal(size=(lead, rank, module.d_out)).astype(np.float32)
            sites[module.name, layer] = SiteWeights(a, b, 0.5 + seed)
    report = AdapterReport(
        kind=AdapterKind.LORA,
        folder="made",
        digest=digest or f"digest{seed:08d}",
        files={},
        file_bytes=0,
        weight_bytes=sum(s.a.nbytes + s.b.nbytes for s in sites.values()),
        modules={},
        max_rank=rank,
        num_tensors=2 * len(sites),
        base_model=None,
        peft_version=None,
    )
    return AdapterWeights(sites, report)
