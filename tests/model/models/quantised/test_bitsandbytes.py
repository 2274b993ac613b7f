"""bitsandbytes' tensors: other storages, other tables, and what is refused by name."""

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.cases.quantised_checkpoints import MOE, maps_of, one_map, plain_tensors
from support.oracles.quantised_files import FORMATS, random_nf4

from lora_jax.models import load
from lora_jax.models.checkpoint import SINGLE
from lora_jax.models.quantised import with_quantised
from lora_jax.models.quantised.forms import FP4

FLOAT32 = np.dtype(np.float32)
STATE = "weight.quant_state.bitsandbytes__nf4"


def stored(nested: bool = True):
    return random_nf4((8, 128), np.random.default_rng(0), nested=nested)


def read(folder, tensors, kind: str = "nf4") -> np.ndarray:
    files, config = one_map(folder, "nf4", tensors)
    config = dataclasses.replace(config, format=kind)
    out = np.empty((8, 128), np.float32)
    with_quantised(files, config, FLOAT32)["a.b.weight"].read((range(8), range(128)), out)
    return out


def test_codes_in_another_storage(tmp_path):
    """quant_storage bfloat16: the same bytes, seen as other numbers."""
    case = stored()
    tensors = case.tensors | {"weight": case.tensors["weight"].reshape(-1, 2).view(np.float16)}
    np.testing.assert_array_equal(read(tmp_path, tensors), case.values)


@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_continue_in_the_next_row_are_read_where_a_map_is_plain(tmp_path, nested):
    case = random_nf4((70, 96), np.random.default_rng(1), nested=nested)
    files, config = one_map(tmp_path, "nf4", case.tensors)
    found = with_quantised(files, config, FLOAT32)
    assert list(found.tensors) == ["a.b.weight"]
    out = np.empty((11, 45), np.float32)
    found["a.b.weight"].read((range(3, 25, 2), range(1, 91, 2)), out)
    np.testing.assert_array_equal(out, case.values[3:25:2, 1:91:2])
    with pytest.raises(ValueError, match=r"a\.b\.weight: rows of 96 weights are not whole blocks"):
        _ = found["a.b.weight"].form


def test_scales_of_such_a_map_are_numbers(tmp_path):
    case = random_nf4((6, 96), np.random.default_rng(1))
    case.tensors["weight.absmax"][5] = np.inf
    files, config = one_map(tmp_path, "nf4", case.tensors)
    found = with_quantised(files, config, FLOAT32)["a.b.weight"]
    with pytest.raises(ValueError, match=r"weight\.absmax holds values that are not finite"):
        found.read((range(1), range(96)), np.empty((1, 96), np.float32))


def test_a_map_that_stays_in_codes_has_whole_blocks(tmp_path):
    """A router is plain and may have any; a product of codes needs a scale for each row."""
    config = MOE | {"moe_intermediate_size": 96}
    tensors = plain_tensors(config, np.random.default_rng(0))
    for name, shape in maps_of(config).items():
        tensors |= {f"{name}.weight": np.zeros(shape, np.float32)}
    down = "model.layers.0.mlp.experts.{}.down_proj"
    case = random_nf4((128, 96), np.random.default_rng(1))
    for name in (down.format(expert) for expert in range(8)):
        tensors |= {f"{name}.{part}": tensor for part, tensor in case.tensors.items()}
    save_file(tensors, tmp_path / SINGLE)
    said = config | {"quantization_config": FORMATS["nf4"].section}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(
        ValueError, match=r"0\.down_proj\.weight: rows of 96 .*llm_int8_skip_modules"
    ):
        load(tmp_path)
    model, _ = load(tmp_path, plain=True)
    values = np.asarray(model.layers[0].mlp.experts.down_proj[...], np.float32)
    want = case.values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(values[5], want)


def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path):
    case = stored(nested=False)
    case.tensors["weight.absmax"][5] = np.nan
    with pytest.raises(ValueError, match=r"a\.b\.weight\.absmax holds values that are not finite"):
        read(tmp_path, case.tensors)


def test_fp4(tmp_path):
    """Sign, then the eight magnitudes in bitsandbytes' order."""
    case = stored(nested=False)
    state = json.loads(case.tensors[STATE].tobytes()) | {"quant_type": "fp4"}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = {n: t for n, t in case.tensors.items() if n != STATE}
    tensors |= {STATE.replace("nf4", "fp4"): text, "weight.quant_map": np.array(FP4, np.float32)}
    codes = case.tensors["weight"][:, 0]
    high_first = np.stack([codes >> 4, codes & 15], axis=1).reshape(8, 2, 64)
    magnitudes = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
    values = np.concatenate([magnitudes, -magnitudes])[high_first]
    want = values * case.tensors["weight.absmax"].reshape(8, 2)[..., None]
    np.testing.assert_array_equal(read(tmp_path, tensors, "fp4"), want.reshape(8, 128))
    with pytest.raises(ValueError, match=r"is fp4, .* bnb_4bit_quant_type is 'nf4': all must be"):
        read(tmp_path, tensors)


def state_with(**changes):
    def change(tensors):
        state = json.loads(tensors[STATE].tobytes()) | changes
        return tensors | {STATE: np.frombuffer(json.dumps(state).encode(), np.uint8)}

    return change


def without(name: str):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def with_one(**changes):
    return lambda tensors: tensors | {n.replace("__", "."): t for n, t in changes.items()}


REFUSED = {
    "lacks absmax": without("weight.absmax"),
    "lacks quant_map": without("weight.quant_map"),
    "lacks one of quant_state": without(STATE),
    "or uint8 with nested_absmax, nested_quant_map": without("weight.nested_absmax"),
    "absmax has 16 bytes, which are no uint8 (11,)": state_with(blocksize=96),
    "rows of 127 weights, an odd number": state_with(shape=[8, 127]),
    "blocksize is 0, not an even number": state_with(blocksize=0),
    "blocksize is 1, not an even number": state_with(blocksize=1),
    "blocksize is None": state_with(blocksize=None),
    "blocksize is True": state_with(blocksize=True),
    "shape is [8], not [d_out, d_in]": state_with(shape=[8]),
    "shape is [-8, -128], not [d_out, d_in]": state_with(shape=[-8, -128]),
    "nested_offset is None, not a number": state_with(nested_offset=None),
    "nested_offset is inf, not a number": state_with(nested_offset=float("inf")),
    "nested_offset is nan, not a number": state_with(nested_offset=float("nan")),
    f"nested_offset is {10**400}, not a number": state_with(nested_offset=10**400),
    "its quant_state's quant_type is 'fp4'": state_with(quant_type="fp4"),
    "a.b.weight has 512 bytes, which are no uint8 (16, 64)": state_with(shape=[16, 128]),
    "its quant_map is not that of nf4": with_one(
        weight__quant_map=np.linspace(-1, 1, 16, dtype=np.float32)
    ),
    "is float32 (15,), expected float32 (16,)": with_one(weight__quant_map=np.ones(15, np.float32)),
    "absmax has 15 bytes": with_one(weight__absmax=np.ones(15, np.uint8)),
    "nested_quant_map is float32 (2,), expected float32 (256,)": with_one(
        weight__nested_quant_map=np.ones(2, np.float32)
    ),
    "nested_absmax is int32 (1,), expected float32 (1,)": with_one(
        weight__nested_absmax=np.ones(1, np.int32)
    ),
    "nested_absmax holds values that are not finite": with_one(
        weight__nested_absmax=np.full(1, np.nan, np.float32)
    ),
    "nested_absmax holds -1: it is the largest magnitude": with_one(
        weight__nested_absmax=np.full(1, -1, np.float32)
    ),
    "nf4 is not an object": lambda tensors: tensors | {STATE: np.frombuffer(b"[1, 2]", np.uint8)},
    "lacks one of quant_state.bitsandbytes__nf4|fp4": lambda tensors: (
        tensors | {STATE.replace("nf4", "fp4"): tensors[STATE]}
    ),
    "nf4 is not JSON": lambda tensors: tensors | {STATE: np.ones(4, np.uint8)},
    "not JSON bytes": lambda tensors: tensors | {STATE: np.ones(5000, np.uint8)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(tmp_path, message):
    tensors = REFUSED[message](stored().tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("nested", "change", "message"),
    [
        (False, {"weight.absmax": -1.0}, "a.b.weight.absmax holds -1: it is the largest magnitude"),
        (False, {"weight.absmax": np.nan}, "a.b.weight.absmax holds values that are not finite"),
        (
            True,
            {"weight.nested_absmax": 3e38, "weight.nested_quant_map": 3.0},
            "a.b.weight.absmax holds values that are not finite",
        ),
    ],
)
def test_scales_that_no_block_has_are_refused_by_name(tmp_path, nested, change, message):
    tensors = stored(nested=nested).tensors
    for name, value in change.items():
        tensors[name] = np.full_like(tensors[name], value)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, tensors)
