"""Reading tensors and boxes of them from safetensors files."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_jax.models import checkpoint
from lora_jax.models.checkpoint import INDEX, SINGLE, Checkpoint


def write(folder: Path, **tensors: np.ndarray) -> Checkpoint:
    save_file(tensors, folder / SINGLE)
    return Checkpoint(folder)


def random_index(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[range, ...]:
    """A box, now and then the whole axis, with steps of 1 to 3."""
    index = []
    for size in shape:
        start, stop = sorted(rng.choice(size + 1, 2, replace=False).tolist())
        whole = rng.random() < 0.4
        index.append(range(size) if whole else range(start, stop, int(rng.integers(1, 4))))
    return tuple(index)


@pytest.mark.parametrize("chunk_bytes", [64, 400, 1 << 20])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_boxes(tmp_path, monkeypatch, chunk_bytes, stored):
    """Small chunks take every path: whole rows, some rows at a time, one long row at a time."""
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(0)
    for shape in ((7,), (6, 50), (3, 5, 40), (2, 3, 4, 5)):
        tensor = rng.standard_normal(shape).astype(stored)
        files = write(tmp_path, x=tensor)
        for _ in range(20):
            index = random_index(rng, shape)
            want = tensor[tuple(slice(r.start, r.stop, r.step) for r in index)]
            out = np.empty(want.shape, np.float32)
            files["x"].read(index, out)
            np.testing.assert_array_equal(out, want.astype(np.float32))


def test_a_target_that_is_not_contiguous(tmp_path):
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4)
    files = write(tmp_path, x=tensor)
    out = np.empty((4, 3), np.float32)
    files["x"].read((range(3), range(4)), out.T)
    np.testing.assert_array_equal(out, tensor.T)


def test_names_without_the_leading_model(tmp_path):
    files = write(tmp_path, **{"layers.0.x": np.zeros(2), "lm_head.weight": np.zeros(2)})
    assert "model.layers.0.x" in files
    assert files["model.layers.0.x"].name == "layers.0.x"
    assert files["lm_head.weight"].name == "lm_head.weight"
    assert "model.layers.1.x" not in files


def test_truncated_file(tmp_path):
    write(tmp_path, x=np.zeros(100, np.float32))
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:-8])
    with pytest.raises(ValueError, match=r"x \(100,\) F32 does not fit .*truncated"):
        Checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(data[:5])
    with pytest.raises(ValueError, match="truncated"):
        Checkpoint(tmp_path)


def test_huge_header(tmp_path):
    (tmp_path / SINGLE).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Checkpoint(tmp_path)


def test_a_pointer_of_git_lfs_and_pickles_are_named(tmp_path):
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(ValueError, match=r"a Git LFS pointer .* `git lfs pull`"):
        Checkpoint(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ValueError, match=r"pytorch_model-00001-of-00002\.bin is not read: unpick"):
        Checkpoint(tmp_path)


def test_header_that_is_not_json(tmp_path):
    (tmp_path / SINGLE).write_bytes((4).to_bytes(8, "little") + b"abcd")
    with pytest.raises(ValueError, match="not JSON"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
    ],
)
def test_entries_that_make_no_sense(tmp_path, entry):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="entry of x is wrong"):
        Checkpoint(tmp_path)


def test_dtype_that_is_not_supported(tmp_path):
    save_file({"x": np.zeros(4, np.int16)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="x has dtype I16"):
        Checkpoint(tmp_path)


def test_folder_without_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="holds neither model"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "absent.safetensors"])
def test_index_that_leads_nowhere(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="is no file of model"):
        Checkpoint(folder)


def test_two_shards_with_one_tensor(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": np.zeros(4, np.float32)}, tmp_path / name)
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"repeats tensors of another file: \['x'\]"):
        Checkpoint(tmp_path)
