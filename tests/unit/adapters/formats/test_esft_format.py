"""ESFT folders: what is read is what was written, and everything else is refused by name."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import tiny_esft

from lora_jax.adapters.formats import esft_format
from lora_jax.adapters.formats.esft_format import EsftReadLimits
from lora_jax.models import model_class
from lora_jax.models.loader import read_config

EXPERTS = {"mixtral": {0: (1, 4), 1: (2,)}, "qwen3_moe": {2: (0, 5)}, "deepseek_v2": {1: (3,)}}
NAMES = {"mixtral": ("w1", "w3", "w2")}
FILE = "part-0.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {kind: tiny_esft.write_moe(root / kind, kind) for kind in tiny_esft.KINDS}


def catalogue_of(base):
    config = read_config(base)
    return model_class(config.model_type).catalogue(config)


def check(weights, tensors, kind):
    """Every tensor of the files is where it belongs, bit for bit."""
    found = {}
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    names = NAMES.get(kind, ("gate_proj", "up_proj", "down_proj"))
    for layer, experts in weights.experts.items():
        for expert, matrices in experts.items():
            for name, matrix in zip(names, matrices, strict=True):
                at = f"model.layers.{layer}.{block}.experts.{expert}.{name}.weight"
                found[at] = matrix
    assert found.keys() == tensors.keys()
    for name, matrix in found.items():
        np.testing.assert_array_equal(matrix, tensors[name])


@pytest.mark.parametrize("kind", tiny_esft.KINDS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_matrix_is_placed(tmp_path, bases, kind, shards):
    base, experts = bases[kind], EXPERTS[kind]
    tensors = tiny_esft.write_esft_adapter(tmp_path / "a", base, experts, 1, shards=shards)
    weights = esft_format.read(tmp_path / "a", catalogue_of(base))
    check(weights, tensors, kind)
    report = weights.report
    assert (report.kind, report.folder, report.max_rank) == ("esft", "a", 0)
    assert report.experts == experts
    assert weights.num_experts == sum(map(len, experts.values()))
    assert report.num_tensors == len(tensors)
    assert report.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert set(report.files) == {
        "expert_cfg.json",
        *(f"part-{n}.safetensors" for n in range(shards)),
    }
    assert weights.digest == report.digest
    shown = json.loads(json.dumps(report.as_json()))
    assert shown["modules"]["experts.up_proj"]["layers"] == sorted(experts)


def test_names_without_model_are_the_old_spelling(tmp_path, bases):
    base = bases["deepseek_v2"]
    tensors = tiny_esft.write_esft_adapter(
        tmp_path / "a", base, {1: (0,), 2: (5,)}, 1, rename=lambda n: n.removeprefix("model.")
    )
    weights = esft_format.read(tmp_path / "a", catalogue_of(base))
    check(weights, tensors, "deepseek_v2")


def test_expert_parallel_folders_are_one_adapter(tmp_path, bases):
    base, folder = bases["qwen3_moe"], tmp_path / "a"
    tensors = tiny_esft.write_esft_adapter(folder, base, {0: (1, 2), 2: (3,)}, 1, shards=2)
    for rank in range(2):
        (folder / f"last_checkpoint_ep{rank}").mkdir()
        place = folder / f"last_checkpoint_ep{rank}" / "model.safetensors"
        (folder / f"part-{rank}.safetensors").rename(place)
    (folder / "logs").mkdir()  # a training folder is fine
    weights = esft_format.read(folder, catalogue_of(base), root=tmp_path)
    check(weights, tensors, "qwen3_moe")
    assert "last_checkpoint_ep1/model.safetensors" in weights.report.files
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (folder / "last_checkpoint_ep1").rename(outside)
    (folder / "last_checkpoint_ep1").symlink_to(outside)
    with pytest.raises(ValueError, match="last_checkpoint_ep1 leads outside"):
        esft_format.read(folder, catalogue_of(base), root=tmp_path)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_file_s_dtype_is_kept(tmp_path, bases, dtype):
    base, folder = bases["qwen3_moe"], tmp_path / "a"
    tiny_esft.write_esft_adapter(folder, base, {0: (1,)}, 1)
    tensors = {n: t.astype(dtype) for n, t in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE)
    weights = esft_format.read(folder, catalogue_of(base))
    check(weights, tensors, "qwen3_moe")
    assert weights.experts[0][1][0].dtype == dtype


# --- one thing wrong at a time ------------------------------------------------------------------

PREFIX = "model.layers.0.mlp.experts.1"


def edit(change):
    def apply(folder):
        tensors = load_file(folder / FILE)
        change(tensors)
        save_file(tensors, folder / FILE)

    return apply


def config(**values):
    def apply(folder):
        path = folder / "expert_cfg.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def transpose(tensors):
    name = f"{PREFIX}.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def not_a_number(value):
    return edit(lambda t: t[f"{PREFIX}.up_proj.weight"].__setitem__((0, 0), value))


def second_file(folder):
    shutil.copy(folder / FILE, folder / "part-1.safetensors")


def pickled(folder):
    (folder / FILE).rename(folder / "pytorch_model.bin")


def old_and_new_name(folder):
    name = f"{PREFIX}.up_proj.weight"
    values = load_file(folder / FILE)[name]
    save_file({name.removeprefix("model."): values}, folder / "part-1.safetensors")


def other_dtype(folder):
    edit(lambda t: t.update({f"{PREFIX}.up_proj.weight": np.zeros((24, 32), "f8")}))(folder)


def short(folder):
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-8])


BAD = {
    "layer without experts": (config(experts={"1": [1]}), "has no experts in layers 1"),
    "layer that is not there": (config(experts={"0": [1], "77": [0]}), "no experts in layers 77"),
    "expert that is not there": (
        config(experts={"0": [1, 6]}),
        "experts of layer 0 names expert 6, the base model has 6",
    ),
    "no experts": (config(experts={"0": []}), "expert_cfg.json: the adapter replaces no expert"),
    "shared experts": (config(shared_experts=True), "expert_cfg.json: shared_experts is true"),
    "unknown key": (config(lora_alpha=1), "expert_cfg.json: unknown keys lora_alpha"),
    "an expert without tensors": (
        config(experts={"0": [1, 2]}),
        "no file has layer 0, expert 2, down_proj; layer 0, expert 2, gate_proj; .* names",
    ),
    "a missing tensor": (
        edit(lambda t: t.pop(f"{PREFIX}.up_proj.weight")),
        "no file has layer 0, expert 1, up_proj, which",
    ),
    "an expert that is not named": (
        edit(
            lambda t: t.update(
                {f"model.layers.0.mlp.experts.{2}.up_proj.weight": np.ones((24, 32), "f4")}
            )
        ),
        r"does not name the expert of model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight",
    ),
    "an expert out of range": (
        edit(
            lambda t: t.update(
                {"model.layers.0.mlp.experts.9.up_proj.weight": np.ones((24, 32), "f4")}
            )
        ),
        r"experts\.9\.up_proj: the base model has 6 experts",
    ),
    "a dense layer's experts": (
        edit(
            lambda t: t.update(
                {"model.layers.1.mlp.experts.0.up_proj.weight": np.ones((24, 32), "f4")}
            )
        ),
        "no experts.up_proj in layer 1",
    ),
    "an unknown tensor": (
        edit(lambda t: t.update({"surprise": np.ones(3, "f4")})),
        r"surprise: the base model \(qwen3_moe\) has no such tensor",
    ),
    "a bias": (
        edit(lambda t: t.update({f"{PREFIX}.up_proj.bias": np.ones(24, "f4")})),
        r"up_proj\.bias: the base model \(qwen3_moe\) has no such tensor",
    ),
    "the router": (
        edit(lambda t: t.update({"model.layers.0.mlp.gate.weight": np.ones((6, 32), "f4")})),
        "mlp.gate.weight is no routed expert's matrix",
    ),
    "attention": (
        edit(
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": np.ones((32, 32), "f4")})
        ),
        "q_proj.weight is no routed expert's matrix",
    ),
    "a transposed matrix": (
        edit(transpose),
        r"experts\.1\.down_proj\.weight has shape \(24, 32\); the base model wants \(32, 24\)",
    ),
    "NaN": (not_a_number(np.nan), r"experts\.1\.up_proj\.weight has values that are NaN"),
    "infinity": (not_a_number(-np.inf), r"experts\.1\.up_proj\.weight has values that are NaN"),
    "float64": (other_dtype, r"part-0.*experts\.1\.up_proj\.weight has dtype F64"),
    "a tensor in two files": (second_file, r"part-1\.safetensors: .* stands in another file"),
    "a tensor in two spellings": (old_and_new_name, r"part-1\.safetensors: layers\.0.* spelling"),
    "a pickle": (pickled, r"no \.safetensors file\. pytorch_model\.bin is not read: unpickling"),
    "no config": (lambda folder: (folder / "expert_cfg.json").unlink(), r"no expert_cfg\.json"),
    "two kinds at once": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "remove one of them",
    ),
    "a truncated file": (short, r"part-0\.safetensors: truncated"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(tmp_path, bases, name):
    change, message = BAD[name]
    folder, base = tmp_path / "a", bases["qwen3_moe"]
    tiny_esft.write_esft_adapter(folder, base, {0: (1,)}, 1)
    esft_format.read(folder, catalogue_of(base))
    change(folder)
    with pytest.raises(ValueError, match=message) as caught:
        esft_format.read(folder, catalogue_of(base))
    assert str(tmp_path) not in str(caught.value)


def test_an_adapter_for_another_base_is_refused(tmp_path, bases):
    tiny_esft.write_esft_adapter(tmp_path / "a", bases["deepseek_v2"], {1: (3,)}, 1)
    with pytest.raises(ValueError, match="has no experts in layers 1"):
        esft_format.read(tmp_path / "a", catalogue_of(bases["qwen3_moe"]))
    dense = tmp_path / "dense"
    tiny_esft.write_model(dense, tiny_esft.TinyShape())
    with pytest.raises(ValueError, match=r"the base model \(llama\) has no experts"):
        esft_format.read(tmp_path / "a", catalogue_of(dense))


def test_limits_count_all_files_together(tmp_path, bases):
    base, folder = bases["mixtral"], tmp_path / "a"
    tiny_esft.write_esft_adapter(folder, base, {0: (1, 2)}, 1, shards=2)
    size = sum(file.stat().st_size for file in folder.iterdir())
    esft_format.read(folder, catalogue_of(base), limits=EsftReadLimits(size))
    with pytest.raises(ValueError, match=r"part-1\.safetensors has \d+ bytes, at most \d+ allowed"):
        esft_format.read(folder, catalogue_of(base), limits=EsftReadLimits(size - 1))
    with pytest.raises(FileNotFoundError, match=r"no folder '.*missing'"):
        esft_format.read(tmp_path / "missing", catalogue_of(base))
