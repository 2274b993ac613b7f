"""A model over another's arena has the same values, in place, quantised or not."""

import json
import os

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from support.cases.quantised_checkpoints import MOE, maps_of, plain_tensors
from support.processes.server_process import ROOT

from lora_jax.memory.arena import ImportedArena, parse_manifest
from lora_jax.memory.host import HostMemory
from lora_jax.models import load
from lora_jax.models.checkpoint import SINGLE
from lora_jax.models.shared_weights import load_from_arena, load_into_arena
from lora_jax.quantize import quantize


def leaves(model) -> dict[str, jax.Array]:
    state = nnx.split(model, graph=False)[1]
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def attached(arena) -> ImportedArena:
    fds = arena.export()
    try:
        return ImportedArena(HostMemory(), parse_manifest(arena.manifest.fields()), fds)
    finally:
        for fd in fds:
            os.close(fd)


def small_moe(tmp_path):
    """A checkpoint of a mixture of experts in bfloat16."""
    rng, folder = np.random.default_rng(0), tmp_path / "plain"
    tensors = plain_tensors(MOE, rng)
    for name, shape in maps_of(MOE).items():
        values = rng.standard_normal(shape) / shape[1] ** 0.5
        tensors[f"{name}.weight"] = values.astype(tensors["lm_head.weight"].dtype)
    folder.mkdir()
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(MOE))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "tiny-moe",
        "fp8",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("stories260k", "int4", "nf4")),
    ],
)
def test_an_attached_model_is_the_loaded_one_in_place(name, tmp_path):
    folder = ROOT / "assets" / name
    if not folder.exists():
        folder = tmp_path / name
        quantize(small_moe(tmp_path), name, folder)
    want = leaves(load(folder)[0])
    owner, config, arena = load_into_arena(folder, HostMemory())
    there = attached(arena)
    model, same = load_from_arena(folder, there)
    assert same == config
    for values in (leaves(owner), leaves(model)):
        assert values.keys() == want.keys()
        for key, array in values.items():
            assert array.dtype == want[key].dtype
            np.testing.assert_array_equal(np.asarray(array), np.asarray(want[key]), err_msg=key)
    inside = [array.unsafe_buffer_pointer() in there.span for array in leaves(model).values()]
    assert all(inside)
    used = sum(array.nbytes for array in want.values())
    assert arena.manifest.num_bytes <= used * 1.02 + 256 * len(want) + 16384


def test_another_model_or_dtype_is_refused():
    folder = ROOT / "assets" / "stories260k"
    _, _, arena = load_into_arena(folder, HostMemory())
    there = attached(arena)
    with pytest.raises(ValueError, match="same folder and dtype"):
        load_from_arena(folder, there, dtype="bfloat16")
    with pytest.raises(ValueError, match="same folder and dtype"):
        load_from_arena(ROOT / "assets" / "tiny-moe", there)
