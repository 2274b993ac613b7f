"""Expert layouts in their corners: orientation, legacy ranks, and files that do not fit."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_experts, peft_format


@pytest.mark.parametrize("version", ["0.19.1", "0.20.0", "0.21.2"])
def test_legacy_block_diagonal_gets_its_own_rank_back(version):
    weights = peft_format.read(cases.FIXTURES / f"{version}-mixtral-legacy", cases.moe())
    ranks = {name: site.rank for (name, _), site in weights.sites.items()}
    assert ranks == {"experts.gate_proj": 2, "experts.up_proj": 2, "experts.down_proj": 2}
    # A full matrix of the same rank stays as it is.
    whole = peft_format.read(cases.FIXTURES / "0.21.2-qwen3_moe-all_linear", cases.moe())
    assert whole.sites["experts.gate_proj", 0].rank == 4


def test_legacy_rank_may_be_missing_from_the_config(tmp_path):
    source = cases.FIXTURES / "0.21.2-mixtral-legacy"
    want = peft_format.read(source, cases.moe()).sites
    cases.change_config(source, tmp_path / "a", rank_pattern={}, alpha_pattern={})
    got = peft_format.read(tmp_path / "a", cases.moe()).sites
    for key in want:
        np.testing.assert_array_equal(cases.site_delta(got[key]), cases.site_delta(want[key]))


@pytest.mark.parametrize("full", ["gate", "up"])
def test_half_a_block_diagonal_keeps_its_rank(tmp_path, full):
    """Only one of gate and up leaves the other's ranks alone: nothing can be split off."""
    tensors = fused_tensors(((12, 16), (24, 12)))
    by_rank = tensors["model.layers.0.mlp.experts.base_layer.lora_B.weight"].reshape(24, 4, 3)
    by_rank[(slice(12, 24), slice(0, 2)) if full == "gate" else (slice(0, 12), slice(2, 4))] = 0
    config = BOTH | {"rank_pattern": {"gate_up_proj": 4}}
    cases.write_adapter(tmp_path / "a", tensors, config)
    sites = peft_format.read(tmp_path / "a", cases.moe()).sites
    assert sites["experts.gate_proj", 0].rank == sites["experts.up_proj", 0].rank == 4


def test_experts_of_different_rank_and_scaling(tmp_path):
    rng = np.random.default_rng(0)
    tensors, want = {}, np.zeros((3, 12, 16))
    for expert, (rank, alpha) in {0: (2, 6), 2: (1, 5)}.items():
        path = f"model.layers.0.mlp.experts.{expert}.gate_proj"
        a, b = rng.normal(size=(rank, 16)), rng.normal(size=(12, rank))
        a, b = a.astype(np.float32), b.astype(np.float32)
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        want[expert] = alpha / rank * b.astype(np.float64) @ a
    config = {"rank_pattern": {"2.gate_proj": 1}, "alpha_pattern": {"experts.2.*": 5}}
    cases.write_adapter(tmp_path / "a", tensors, config)
    site = peft_format.read(tmp_path / "a", cases.moe()).sites["experts.gate_proj", 0]
    assert site.a.shape == (3, 2, 16)
    np.testing.assert_allclose(cases.site_delta(site), want, atol=1e-5)


@pytest.mark.parametrize(
    ("folder", "catalogue"),
    [
        ("0.21.2-mixtral-square", cases.moe(hidden=24)),
        ("0.18.1-mixtral-square", cases.moe(hidden=24)),
        ("0.19.0-gpt_oss-square", cases.gpt_oss(inner=16)),
    ],
)
def test_square_matrix_without_version_is_refused(tmp_path, folder, catalogue):
    cases.change_config(cases.FIXTURES / folder, tmp_path / "a", drop=["peft_version"])
    with pytest.raises(ValueError, match=r"experts\.lora_A\.weight.* square.* peft_version"):
        peft_format.read(tmp_path / "a", catalogue)


def test_square_matrix_follows_its_sibling_before_the_version(tmp_path):
    """gate_up is square (hidden = 2 * intermediate), down is not: it tells the orientation."""
    rng = np.random.default_rng(0)
    path, a_up, b_up = "model.layers.0.mlp.experts", (6, 24), (24, 6)
    swapped = {
        f"{path}.base_layer.lora_A.weight": rng.normal(size=a_up).astype(np.float32),
        f"{path}.base_layer.lora_B.weight": rng.normal(size=b_up).astype(np.float32),
        f"{path}.lora_A.weight": rng.normal(size=(6, 24)).astype(np.float32),
        f"{path}.lora_B.weight": rng.normal(size=(12, 6)).astype(np.float32),
    }
    cases.write_adapter(tmp_path / "a", swapped, {"peft_version": "0.21.2"})
    sites = peft_format.read(tmp_path / "a", cases.moe(hidden=24)).sites
    a = swapped[f"{path}.base_layer.lora_A.weight"].reshape(3, 2, 24)  # stands on the output side
    b = swapped[f"{path}.base_layer.lora_B.weight"].reshape(24, 2, 3)
    want = np.einsum("ire,ero->eoi", b, a) * 3
    got = np.concatenate(
        [cases.site_delta(sites[f"experts.{n}_proj", 0]) for n in ("gate", "up")], axis=1
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_one_pair_without_target_parameters_is_placed_by_its_shape(tmp_path, leaf):
    source = cases.FIXTURES / f"0.21.2-mixtral-{leaf}"
    want = peft_format.read(source, cases.moe()).sites
    cases.change_config(source, tmp_path / "a", target_parameters=None)
    assert peft_format.read(tmp_path / "a", cases.moe()).sites.keys() == want.keys()


def fused_tensors(gate_up=((6, 16), (24, 6)), down=((6, 12), (16, 6)), nesting=".base_layer"):
    """Return stacked experts with these shapes of A and B."""
    path, rng, tensors = "model.layers.0.mlp.experts", np.random.default_rng(0), {}
    for infix, shapes in ((nesting, gate_up), ("", down)):
        for side, shape in zip("AB", shapes or (), strict=False):
            tensors[f"{path}{infix}.lora_{side}.weight"] = rng.normal(size=shape).astype(np.float32)
    return tensors


BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
EXPERT_REFUSALS = {
    "wrong_size": (fused_tensors(((6, 17), (24, 6))), BOTH, r"\(6, 17\).*gate_up_proj.*16 -> 24"),
    "not_per_expert": (fused_tensors(((5, 16), (24, 5))), BOTH, r"\(5, 16\).*3 experts"),
    "opposite": (fused_tensors(((6, 24), (16, 6))), BOTH, "opposite orientations"),
    "rank": (fused_tensors(((9, 16), (24, 9))), BOTH, r"has rank 3, the config says 2"),
    "double_rank": (fused_tensors(((12, 16), (24, 12))), BOTH, "has rank 4, the config says 2"),
    "one_of_two": (fused_tensors(None), BOTH, "one pair of matrices for two target_parameters"),
    "neither": (fused_tensors(None, ((6, 7), (16, 6))), {}, r"\(6, 7\).*fits neither"),
    "no_outer": (fused_tensors(down=None), BOTH, r"base_layer\.lora_A.* nested 1 deep"),
    "biases": (fused_tensors(nesting=".base_layer.base_layer"), {}, "expert biases"),
    "shared_shape": (
        {
            "model.layers.0.mlp.experts.w1.lora_A": np.ones((2, 2, 16), np.float32),
            "model.layers.0.mlp.experts.w1.lora_B": np.ones((3, 12, 2), np.float32),
        },
        {},
        r"w1\.lora_A \(2, 2, 16\).* 3 experts 16 -> 12",
    ),
    "expert_number": (
        {
            "model.layers.0.mlp.experts.3.w1.lora_A.weight": np.ones((2, 16), np.float32),
            "model.layers.0.mlp.experts.3.w1.lora_B.weight": np.ones((12, 2), np.float32),
        },
        {},
        r"experts\.3\.w1: the base model has 3 experts",
    ),
    "two_layouts": (
        fused_tensors()
        | {
            "model.layers.0.mlp.experts.0.w1.lora_A.weight": np.ones((2, 16), np.float32),
            "model.layers.0.mlp.experts.0.w1.lora_B.weight": np.ones((12, 2), np.float32),
        },
        BOTH,
        "under two names",
    ),
}


@pytest.mark.parametrize("case", EXPERT_REFUSALS)
def test_expert_files_that_do_not_fit_are_refused(tmp_path, case):
    tensors, config, message = EXPERT_REFUSALS[case]
    cases.write_adapter(tmp_path / "a", tensors, config)
    with pytest.raises(ValueError, match=f"adapter_model.safetensors: .*{message}"):
        peft_format.read(tmp_path / "a", cases.moe())


@pytest.mark.parametrize(
    ("version", "transposed", "want"),
    [
        ("0.17.1", False, False),
        ("0.18.1", False, False),
        ("0.18.1", True, True),
        ("0.19.0", False, False),
        ("0.19.0", True, False),
        ("0.19.1", False, True),
        ("0.19.2.dev0@abc", True, None),
        ("0.22.0.dev0@abc", True, True),
        ("0.21.2", True, True),
        ("1.0.0", False, True),
        (None, False, None),
        ("main", True, None),
    ],
)
def test_orientation_by_version(version, transposed, want):
    assert peft_experts.natural(version, transposed) is want
