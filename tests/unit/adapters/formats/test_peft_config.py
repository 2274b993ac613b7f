"""adapter_config.json: what is applied, what may stand there, what is refused by name."""

import json

import pytest

from lora_jax.adapters.formats import peft_config

REAL_CONFIGS = {
    "peft_llama32_3b_r32.json": None,
    "peft_llama32_3b_r64_rslora.json": None,
    "peft_llama32_3b_r32_dora.json": "use_dora = true is not supported",
    "peft_llama32_3b_r10_mlp.json": None,
    "peft_llama32_3b_adalora.json": 'peft_type is "ADALORA"',
    "peft_textgen_r8.json": None,
    "bactrian_x_llama_7b_r64.json": None,
    "alpaca_lora_7b_r16.json": None,
    "sift_opf_zh_r16_moe_base.json": r'modules_to_save = \["classifier", "score"\]',
    "gemma3_270m_r4.json": None,
    "open_calm_1b_r1_f16.json": None,
    "phi15_r4.json": None,
    "gpt2_r8_seqcls.json": None,
    "gpt2_r8_causal.json": None,
}


def test_every_real_config_is_read_or_refused_for_its_reason(real_data):
    folder = real_data / "peft_configs"
    assert {entry["file"] for entry in json.loads((folder / "INDEX.json").read_text())} == set(
        REAL_CONFIGS
    )
    for name, refusal in REAL_CONFIGS.items():
        data = (folder / name).read_bytes()
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                peft_config.parse(data)
            continue
        config, raw = peft_config.parse(data), json.loads(data)
        assert config.rank == raw["r"]
        power = 0.5 if raw.get("use_rslora") else 1
        assert config.scaling_of("any", raw["r"]) == raw["lora_alpha"] / raw["r"] ** power


def parse(drop=(), **changes) -> peft_config.PeftConfig:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | changes
    return peft_config.parse(
        json.dumps({k: v for k, v in config.items() if k not in drop}).encode()
    )


def test_defaults_that_every_version_writes_are_read():
    """All keys that PEFT up to 0.21.2 writes for LoraConfig(r=4), with their defaults."""
    nothing = dict.fromkeys(
        [
            *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config"),
            *("base_model_name_or_path", "enable_lora", "eva_config", "exclude_modules"),
            *("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"),
            *("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config"),
            *("revision", "target_modules", "target_parameters", "task_type", "use_bdlora"),
            *("trainable_token_indices", "velora_config", "key_of_the_future"),
        ]
    )
    config = parse(
        **nothing,
        alpha_pattern={},
        bias="none",
        ensure_weight_tying=False,
        fan_in_fan_out=True,
        inference_mode=True,
        init_lora_weights=True,
        loftq_config={},
        lora_bias=False,
        lora_dropout=0.1,
        megatron_core="megatron.core",
        merge_weights=False,
        peft_version="0.21.2",
        qalora_group_size=16,
        rank_pattern={},
        use_dora=False,
        use_qalora=False,
        use_rslora=False,
    )
    assert (config.rank, config.alpha, config.scaling_of("x", 4)) == (4, 8.0, 2.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("trainable_token_indices", [0]),
        ("trainable_token_indices", {"embed_tokens": [0]}),
        ("modules_to_save", ["lm_head"]),
        ("megatron_config", {"a": 1}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"scale": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("corda_config", {"corda_method": "ipm"}),
        ("lora_ga_config", {"direction": "ArBr"}),
        ("ensure_weight_tying", True),
        ("enable_lora", [True, False, True]),
        ("merge_weights", True),
        ("key_of_the_future", False),
        ("key_of_the_future", {"x": "y" * 500}),
    ],
)
def test_a_variant_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError, match=key) as caught:
        parse(**{key: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new", 1, {}]
)
def test_inits_that_change_the_base_are_refused(init):
    with pytest.raises(ValueError, match="init_lora_weights is"):
        parse(init_lora_weights=init)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_inits_that_leave_the_base_alone_are_read(init):
    assert parse(init_lora_weights=init).rank == 4


@pytest.mark.parametrize("kind", [None, "ADALORA", "LOHA", "lora", 3])
def test_other_methods_are_refused(kind):
    with pytest.raises(ValueError, match="peft_type is"):
        parse(peft_type=kind)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in (0, -1, 2.5, "8", True, None, 10**9)),
        *(("lora_alpha", value) for value in ("8", True, 1e30, 10**400, None)),
        ("rank_pattern", []),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": "8"}),
        ("rank_pattern", {"q_proj": 1.5}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("rank_pattern", {"(": 3}),
        ("rank_pattern", {"[a": 3}),
        ("rank_pattern", {"(?=a)b": 3}),
        ("rank_pattern", {r"(a)\1": 3}),
        ("rank_pattern", {f"layer{i}": 1 for i in range(1001)}),
        ("rank_pattern", {"a" * 600: 3}),
        ("target_parameters", "experts.gate_up_proj"),
        ("target_parameters", [1]),
        ("use_rslora", "yes"),
        ("base_model_name_or_path", 3),
        ("peft_version", [1]),
    ],
)
def test_nonsense_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "-Infinity"])
def test_alpha_that_is_not_finite_is_refused(alpha):
    data = f'{{"peft_type": "LORA", "r": 1, "lora_alpha": {alpha}}}'.encode()
    with pytest.raises(ValueError, match="lora_alpha is"):
        peft_config.parse(data)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[1]", b"3"])
def test_what_is_not_a_json_object_is_refused(data):
    with pytest.raises(ValueError, match=r"not (valid JSON|a JSON object)"):
        peft_config.parse(data)


@pytest.mark.parametrize(
    ("data", "key"),
    [(b'{"r": 8, "r": 64}', "r"), (b'{"rank_pattern": {"q_proj": 1, "q_proj": 2}}', "q_proj")],
)
def test_a_key_that_stands_twice_is_refused_by_its_name(data, key):
    with pytest.raises(ValueError, match=f"the key '{key}' stands twice"):
        peft_config.parse(data)


def test_first_matching_pattern_wins_as_in_peft():
    config = parse(
        rank_pattern={"q_proj": 2, r".*\.self_attn.*": 3, "^model.layers.1.mlp.up_proj": 5},
        alpha_pattern={"layers.0.self_attn.q_proj": 10, "q_proj|k_proj": 20},
    )
    name = "model.layers.{}.self_attn.{}"
    assert config.rank_of(name.format(0, "q_proj")) == 2
    assert config.rank_of(name.format(0, "v_proj")) == 3
    assert config.rank_of("model.layers.1.mlp.up_proj") == 5
    assert config.rank_of("x.model.layers.1.mlp.up_proj") == 4
    assert config.rank_of("model.layers.1.mlp.xq_proj") == 4  # whole names only
    assert config.scaling_of(name.format(0, "q_proj"), 2) == 5.0
    assert config.scaling_of(name.format(1, "k_proj"), 2) == 10.0
    assert config.scaling_of(name.format(1, "v_proj"), 2) == 4.0


def test_rank_stabilised_scaling():
    assert parse(use_rslora=True).scaling_of("x", 16) == 2.0


def test_parameters_match_by_suffix_as_in_peft():
    config = parse(target_parameters=["experts.gate_up_proj", "down_proj"])
    assert config.targets("model.layers.0.mlp.experts.gate_up_proj")
    assert config.targets("model.layers.0.mlp.experts.down_proj")
    assert not config.targets("model.layers.0.mlp.xexperts.gate_up_proj")
    assert not config.targets("model.layers.0.mlp.experts.up_proj")


def test_too_many_patterns_for_too_many_modules():
    config = parse(rank_pattern={f"layer{i}": 1 for i in range(1000)})
    config.check_size(1000)
    with pytest.raises(ValueError, match="1000 patterns for 2000 modules"):
        config.check_size(2000)
