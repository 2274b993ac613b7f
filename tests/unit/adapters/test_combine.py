"""Folders of combined adapters against PEFT's own, and folders that cannot be combined."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_jax.adapters import merge_methods
from lora_jax.adapters.combine import combine, main, read_source
from lora_jax.adapters.merge_methods import Method

WEIGHTS = (0.7, -1.5, 0.4)
Q, V = "layers.0.q_proj", "layers.0.v_proj"


def write(folder, modules=(Q, V), rank=2, seed=0, d_in=6, d_out=5, dtype="f4", **config):
    """Write an adapter of random values, A and B not zero."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for path in modules:
        for side, shape in (("A", (rank, d_in)), ("B", (d_out, rank))):
            name = f"base_model.model.{path}.lora_{side}.weight"
            tensors[name] = rng.standard_normal(shape).astype(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    base = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": []}
    base["target_modules"] = sorted({path.rpartition(".")[2] for path in modules})
    (folder / "adapter_config.json").write_text(json.dumps(base | config))
    return folder


def three(tmp_path, **config):
    """Three adapters, of which the last lacks v_proj."""
    return [
        write(tmp_path / "a", seed=1, **config),
        write(tmp_path / "b", seed=2, **config),
        write(tmp_path / "c", modules=(Q,), seed=3, **config),
    ]


def of_peft(folders, method, tmp_path, monkeypatch):
    """Return the folder that PEFT writes; dare_* draws our values in PEFT's place."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    rng = np.random.default_rng(method.seed)

    def draw(density):
        shape = tuple(density.shape)
        return torch.from_numpy(merge_methods.random_mask(shape, method.density, rng))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = torch.nn.Linear(6, 5, bias=False)
            self.v_proj = torch.nn.Linear(6, 5, bias=False)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer()])

    model = peft.PeftModel.from_pretrained(Model(), folders[0], adapter_name="p0")
    for place, folder in enumerate(folders[1:], 1):
        model.load_adapter(folder, f"p{place}")
    names = [f"p{place}" for place in range(len(folders))]
    monkeypatch.setattr(torch, "bernoulli", draw)
    model.base_model.add_weighted_adapter(
        names,
        list(WEIGHTS[: len(names)]),
        "made",
        combination_type=method.combination_type,
        density=method.density,
        majority_sign_method=method.majority_sign_method,
    )
    model.save_pretrained(tmp_path / "peft", selected_adapters=["made"])
    return tmp_path / "peft" / "made"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize(
    ("kind", "density"),
    [("cat", None), ("linear", None), ("ties", 0.4), ("dare_linear", 0.6), ("dare_ties", 0.6)],
)
def test_the_files_are_those_of_peft(tmp_path, monkeypatch, kind, density, sign):
    folders, method = three(tmp_path), Method(kind, density, sign, seed=5)
    combine(folders, WEIGHTS, tmp_path / "out", method)
    theirs = of_peft(folders, method, tmp_path, monkeypatch)
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    wanted = load_file(theirs / "adapter_model.safetensors")
    assert ours.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_array_equal(ours[name], want, err_msg=name)
    made, there = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "out", theirs)
    )
    for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"):
        assert made[key] == there[key], key
    assert set(made["target_modules"]) == set(there["target_modules"])


def delta(folder, path):
    """What a folder adds to a module, in float64."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{path}.lora_{s}.weight"].astype("f8") for s in "AB")
    root = len(a) ** 0.5 if config.get("use_rslora") else len(a)
    return config["lora_alpha"] / root * (b @ a)


def test_cat_of_other_ranks_scalings_and_modules_is_the_sum(tmp_path):
    folders = [
        write(tmp_path / "a", rank=2, seed=1, use_rslora=True),
        write(tmp_path / "b", modules=(V,), rank=4, seed=2, dtype="f2"),
    ]
    combine(folders, (0.5, -2.0), tmp_path / "out", Method("cat"))
    q, v = (delta(tmp_path / "out", path) for path in (Q, V))
    np.testing.assert_allclose(q, 0.5 * delta(folders[0], Q), rtol=1e-5)
    want = 0.5 * delta(folders[0], V) - 2 * delta(folders[1], V)
    np.testing.assert_allclose(v, want, rtol=1e-5, atol=1e-6)


def test_modules_that_a_pattern_or_layers_chose_are_named_in_full(tmp_path):
    folders = [
        write(tmp_path / "a", layers_to_transform=[0]),
        write(tmp_path / "b", modules=(Q,), target_modules=".*q_proj"),
    ]
    combine(folders, (1.0, 1.0), tmp_path / "out", Method("linear"))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == [Q, V]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_command_writes_other_types(tmp_path, dtype):
    folders = [str(folder) for folder in three(tmp_path)]
    out = tmp_path / "out"
    flags = ["--weights", "0.7", "-1.5", "0.4", "--dtype", dtype, "--out", str(out)]
    main([*folders, *flags])
    assert {str(v.dtype) for v in load_file(out / "adapter_model.safetensors").values()} == {dtype}


CANNOT = {
    "rank": (
        {"rank": 4},
        "linear",
        r"linear needs equal ranks: .*a 2, .*b 4\. cat takes any\.",
    ),
    "size": ({"d_out": 7}, "cat", r"q_proj maps 6 to 5 in .*a, 6 to 7 in .*b: not the same base"),
    "base": ({"base_model_name_or_path": "x/two"}, "cat", "different base models: .*Set --base"),
    "dora": ({"use_dora": True}, "cat", r"b: adapter_config.json: use_dora = true is not supp"),
    "parameters": (
        {"target_parameters": ["mlp.experts.down_proj"]},
        "cat",
        "b: target_parameters cannot be combined",
    ),
    "experts": (
        {"modules": ("layers.0.mlp.experts",)},
        "cat",
        r"b: .*mlp.experts.lora_A.weight holds several experts",
    ),
    "config": ({"r": 3}, "cat", r"b: .*q_proj.lora_A.weight has rank 2, the config says 3"),
    "pattern": (
        {"rank": 1, "r": 2, "rank_pattern": {"q_proj": 1, "v_proj": 1}},
        "linear",
        r"q_proj has rank 2 in .*a and 1 in .*b; linear needs equal ranks, cat takes any",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_combined_is_named(tmp_path, case):
    given, kind, message = CANNOT[case]
    one = write(tmp_path / "a", base_model_name_or_path="x/one")
    two = write(tmp_path / "b", **given)
    with pytest.raises(ValueError, match=message):
        combine([one, two], (1.0, 1.0), tmp_path / "out", Method(kind))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_matrices_that_are_none_or_do_not_fit_are_named(tmp_path):
    folder = write(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = f"base_model.model.{Q}.lora_A.weight"
    tensors[name] = tensors[name][:1]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \(1, 6\), .*their ranks differ"):
        read_source(folder)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="a: no LoRA matrices"):
        read_source(folder)


def test_values_that_are_not_finite_are_named_with_their_folders(tmp_path):
    one, two = write(tmp_path / "a"), write(tmp_path / "b")
    tensors = load_file(two / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, two / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"a or .*b: .*lora"):
        combine([one, two], (1.0, 1.0), tmp_path / "out", Method("linear"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "2 to 16 adapters can be combined, got 1."),
        (["{a}", "--weights", "1"], "2 adapters need as many weights, got 1."),
        (["{a}", "--weights", "1", "nan"], "must be a number other than 0 in [-100, 100]"),
        (["{a}", "--combination-type", "ties"], "ties needs a density above 0"),
        (["{a}", "--out", "{a}"], "exists; name a new folder."),
        (["{a}", "--out", "{a}/no/out"], "there is no folder"),
        (["{a}.no"], "there is no folder"),
        (["{a}", "--dtype", "float16", "--weights", "1", "1"], "too large for float16"),
    ],
)
def test_bad_arguments_end_the_command_with_one_line(tmp_path, capsys, flags, message):
    one = write(tmp_path / "a", lora_alpha=1e6)
    given = [flag.replace("{a}", str(one)) for flag in flags]
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out"), str(one), *given])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert re.search(re.escape(message), said), said
    assert not (tmp_path / "out").exists()
