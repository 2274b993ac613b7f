"""PEFT folders of every layout and version: the deltas they stand for, and what is refused."""

import adapter_cases as cases
import numpy as np
import pytest

from lora_jax.adapters import peft_format

FOLDERS = sorted(path.name for path in cases.FIXTURES.iterdir())
CATALOGUES = {
    "llama-head": cases.llama(),
    "gpt_oss": cases.gpt_oss(),
    "gpt_oss-square": cases.gpt_oss(inner=16),
    "mixtral-square": cases.moe(hidden=24),
    "mixtral": cases.moe(),
    "qwen3_moe": cases.moe("qwen3_moe"),
    "deepseek_v2": cases.deepseek_v2(),
    "dbrx": cases.dbrx(),
}


def catalogue_of(folder: str):
    """Return the catalogue of a fixture `<version>-<kind>-<variant>`."""
    kind = folder.split("-", 1)[1]
    return CATALOGUES.get(kind) or CATALOGUES[kind.split("-")[0]]


def found_deltas(folder: str, catalogue) -> dict[str, np.ndarray]:
    """Return what the reader made of a fixture, under the names of expected.npz."""
    weights = peft_format.read(cases.FIXTURES / folder, catalogue)
    return {
        f"{name}@{layer}": cases.site_delta(site) for (name, layer), site in weights.sites.items()
    }


def expected_deltas(folder: str, catalogue) -> dict[str, np.ndarray]:
    """Return expected.npz by site: PEFT's own deltas, cut apart by hand where sites are fused."""
    with np.load(cases.FIXTURES / folder / "expected.npz") as stored:
        parts: dict[str, np.ndarray] = {}
        for name, delta in stored.items():
            _cut(name.removesuffix(".weight").split("."), delta, catalogue, parts)
    return parts


def _cut(path, delta, catalogue, parts):
    layer = next((int(part) for part in path if part.isdigit()), 0)
    leaf = path[-1]
    if "experts" in path:
        return _cut_experts(path[path.index("experts") + 1 :], layer, delta, catalogue, parts)
    if leaf == "kv_b_proj":
        heads = delta.reshape(cases.HEADS, cases.NOPE + cases.V_DIM, cases.LATENT)
        parts[f"kv_b_proj.k@{layer}"] = heads[:, : cases.NOPE].transpose(0, 2, 1)
        parts[f"kv_b_proj.v@{layer}"] = heads[:, cases.NOPE :]
    elif leaf == "Wqkv":
        for name, part in zip("qkv", np.split(delta, [16, 24]), strict=True):
            parts[f"{name}_proj@{layer}"] = part[None]
    else:
        names = {"gate": "router", "router": "router", "layer": "router", "out_proj": "o_proj"}
        prefix = "shared_experts." if "shared_experts" in path else ""
        parts[f"{prefix}{names.get(leaf, leaf)}@{layer}"] = delta[None]
    return None


def _cut_experts(rest, layer, delta, catalogue, parts):
    short = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    if rest[-1] not in ("gate_up_proj", "down_proj") or len(rest) == 2:
        name = f"experts.{short.get(rest[-1], rest[-1])}@{layer}"
        if len(rest) == 1:
            parts[name] = delta
        else:
            old = parts.get(name, np.zeros((3, *delta.shape), np.float32))
            old[int(rest[0])] = delta
            parts[name] = old
        return
    if catalogue.interleaved_gate_up:
        delta = delta.transpose(0, 2, 1)  # GPT-OSS keeps [E, in, out]
    if rest[-1] == "down_proj":
        parts[f"experts.down_proj@{layer}"] = delta
        return
    half = delta.shape[1] // 2
    way = catalogue.interleaved_gate_up
    gate, up = (delta[:, ::2], delta[:, 1::2]) if way else (delta[:, :half], delta[:, half:])
    parts[f"experts.gate_proj@{layer}"], parts[f"experts.up_proj@{layer}"] = gate, up


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_layout_gives_the_deltas_of_its_writer(folder):
    catalogue = catalogue_of(folder)
    want, got = expected_deltas(folder, catalogue), found_deltas(folder, catalogue)
    assert want.keys() == got.keys()
    for name in want:
        assert np.abs(want[name]).max() > 1e-3
        full = np.broadcast_to(got[name], want[name].shape)
        np.testing.assert_allclose(full, want[name], atol=1e-6, rtol=1e-5, err_msg=name)
