"""Gains of PEFT folders: what is read of DoRA and biases, and what is refused by name."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.peft_gains import words_of
from lora_jax.adapters.gains import ROWS, gain_site, resolved, with_gains
from lora_jax.adapters.weights import RawGain

PLAIN = cases.llama()
CATALOGUE = with_gains(PLAIN, ["q_proj", "lm_head", "no_such_module"])
AT = "model.layers.0.self_attn.q_proj"
RNG = np.random.default_rng(0)
VECTOR = RNG.normal(size=16).astype("f4")


def write(folder, config, **tensors):
    own = {
        f"{AT}.lora_A.weight": np.ones((2, 16), "f4"),
        f"{AT}.lora_B.weight": np.ones((16, 2), "f4"),
    }
    own |= {name.replace("AT", AT): value for name, value in tensors.items()}
    cases.write_adapter(folder, own, {"r": 2, "lora_alpha": 6, **config})
    return folder


def read(folder, catalogue=CATALOGUE):
    return peft_format.read(folder, catalogue)


@pytest.mark.parametrize(
    ("config", "name", "kind", "factor", "words"),
    [
        ({"use_dora": True}, "AT.lora_magnitude_vector", "magnitude", 1, "DoRA"),
        ({"lora_bias": True}, "AT.lora_B.bias", "shift", 3, "a bias of lora_B"),
        ({"bias": "all"}, "AT.base_layer.bias", "bias", 1, "trained biases of the base"),
        ({"bias": "lora_only"}, "AT.bias", "bias", 1, "trained biases of the base"),
    ],
)
def test_a_gain_is_read_of_its_site(tmp_path, config, name, kind, factor, words):
    weights = read(write(tmp_path / "a", config, **{name: VECTOR}))
    assert weights.gains.keys() == {("q_proj", 0)} == weights.sites.keys()
    got = weights.gains["q_proj", 0]
    np.testing.assert_allclose(getattr(got, kind), factor * VECTOR, rtol=1e-6)
    assert words_of(weights.gains) == weights.report.brings == (words,)
    made = resolved(weights, {("q_proj", 0): gain_site(RawGain(shift=VECTOR), None, None, "q")})
    assert not made.gains
    assert made.sites.keys() == {("q_proj", 0), ("q_proj.gain", 0)}
    assert made.report.weight_bytes == weights.report.weight_bytes + ROWS * 16 * 4
    assert made.rows_by_width()[16] == weights.rows_by_width()[16] + ROWS


MOE = with_gains(cases.moe(), ["q_proj"])
REFUSED = [
    ({"use_dora": True}, {}, "has LoRA without DoRA, which use_dora announces"),
    ({"lora_bias": True}, {}, "without a bias of lora_B, which lora_bias announces"),
    ({}, {"AT.bias": VECTOR}, "bias is not a LoRA matrix of a module, and would be lost"),
    ({"bias": "all"}, {"AT.bias": VECTOR[:3]}, r"has shape \(3,\); the base wants \(16,\)"),
    (
        {"bias": "all"},
        {"model.norm.bias": VECTOR},
        r"model\.norm\.bias: .* not supported, only on linear maps",
    ),
    (
        {"bias": "all"},
        {"model.layers.0.self_attn.k_proj.bias": VECTOR[:8]},
        "on k_proj is not supported",
    ),
    ({"bias": "some"}, {}, 'bias is "some"; none, all, lora_only are known'),
    ({"use_dora": True, "lora_bias": True}, {}, "use_dora and lora_bias together"),
    ({"use_dora": 1}, {}, "use_dora is 1, not true or false"),
]


@pytest.mark.parametrize(("config", "tensors", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, config, tensors, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "a", config, **tensors))


def test_a_reader_without_room_says_what_a_server_needs(tmp_path):
    folder = write(tmp_path / "a", {"bias": "all"}, **{"AT.bias": VECTOR})
    with pytest.raises(ValueError, match="takes none: start it with enable_dora_and_bias"):
        read(folder, PLAIN)


def test_outputs_of_experts_are_refused(tmp_path):
    at, folder = "model.layers.0.mlp.experts.0.gate_proj", tmp_path / "a"
    folder = write(folder, {"bias": "all"}, **{f"{at}.bias": VECTOR[:12]})
    with pytest.raises(ValueError, match=r"base on experts\.gate_proj is not supported"):
        read(folder, MOE)
