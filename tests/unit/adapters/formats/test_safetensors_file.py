"""Strict reading of safetensors: what the library writes is read, everything crooked is refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.adapters.formats import folder
from lora_jax.adapters.formats.safetensors_file import (
    FileLimits,
    parse,
    read_file,
    read_header,
    tensor_names,
)

LIMITS = FileLimits(max_header_bytes=4096, max_tensors=8)


def made(header, data: bytes = b"") -> bytes:
    """Return a file with this header (object or raw bytes) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_what_the_library_writes_is_read():
    tensors = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.ones((3,), np.float16),
        "bf16": np.full((2, 2, 1), 1.5, ml_dtypes.bfloat16),
    }
    data = safetensors.numpy.save(tensors, {"format": "pt"})
    found = parse(data, "x.safetensors", LIMITS)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        assert found[name].shape == want.shape
        got = found[name].read()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        assert not got.flags.writeable


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite(bad, dtype):
    values = np.array([1, bad, 2], dtype)
    found = parse(safetensors.numpy.save({"w": values}), "x.safetensors", LIMITS)
    with pytest.raises(ValueError, match="w has values that are NaN or infinite"):
        found["w"].read()


TWO = {"a": entry(), "b": entry(offsets=(8, 16))}
REFUSALS = {
    "nothing": (b"", "only 0 bytes"),
    "short": (b"1234567", "only 7 bytes"),
    "zip": (b"PK\x03\x04\x14\x00\x08\x08\x08\x00", "not a safetensors file"),
    "git_lfs": (b"version https://git-lfs.github.com/spec/v1\n", "pointer .* by `git lfs pull`"),
    "huge_header": (struct.pack("<Q", 1 << 26), "header of 67108864 bytes, at most 4096"),
    "header_cut": (made(TWO)[:20], "truncated: header of"),
    "not_utf8": (made(b"\xff\xfe{}"), "not valid JSON"),
    "not_json": (made(b"{]"), "not valid JSON"),
    "deep": (made(b"[" * 4000), "not valid JSON"),
    "list": (made([1]), "not a JSON object"),
    "twice": (made(b'{"a": 1, "a": 2}'), "a name stands twice"),
    "nan_in_header": (made(b'{"a": NaN}'), "the header holds NaN"),
    "data_cut": (made(TWO, bytes(15)), "truncated: b ends at byte 16, the data at 15"),
    "data_left": (made(TWO, bytes(17)), "1 bytes after the last tensor"),
    "gap": (made({"a": entry(offsets=(4, 12))}, bytes(12)), "a starts at byte 4"),
    "overlap": (made({"a": entry(), "b": entry()}, bytes(8)), "b starts at byte 0"),
    "size": (made({"a": entry(shape=(3,))}, bytes(8)), r"a with shape \(3,\) takes 12 bytes"),
    "negative": (made({"a": entry(shape=(-2,))}, bytes(8)), "a has a shape"),
    "zero": (made({"a": entry(shape=(0,), offsets=(0, 0))}), "a has a shape"),
    "float_shape": (made({"a": entry(shape=(2.0,))}, bytes(8)), "a has a shape"),
    "many_dims": (made({"a": entry(shape=(1,) * 9)}, bytes(4)), "a has a shape"),
    "offsets": (made({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "a has data_offsets"),
    "backwards": (made({"a": entry(offsets=(8, 0))}, bytes(8)), "its offsets say -8"),
    "dtype_f64": (made({"a": entry("F64", (1,))}, bytes(8)), "a has dtype F64; only F32"),
    "dtype_fp8": (made({"a": entry("F8_E4M3", (8,))}, bytes(8)), "a has dtype F8_E4M3"),
    "dtype_number": (made({"a": entry(3)}, bytes(8)), "a has dtype 3"),
    "fields": (made({"a": entry() | {"x": 1}}, bytes(8)), "the header entry of a"),
    "no_entry": (made({"a": 3}), "the header entry of a"),
    "many": (made({str(i): entry() for i in range(9)}), "9 tensors, at most 8"),
    "name_control": (made({"a\nb": entry()}, bytes(8)), "not printable"),
    "name_empty": (made({"": entry()}, bytes(8)), "empty, too long or not printable"),
    "name_long": (made({"n" * 600: entry()}, bytes(8)), "too long"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_crooked_files_are_refused(case):
    data, message = REFUSALS[case]
    with pytest.raises(ValueError, match=rf"^x\.safetensors: .*{message}"):
        parse(data, "x.safetensors", LIMITS)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 200), flip=st.integers(0, 200), byte=st.integers(0, 255))
def test_damage_is_an_error_or_leaves_finite_tensors_of_the_given_size(cut, flip, byte):
    whole = bytearray(safetensors.numpy.save({"a": np.ones((2, 3), np.float32)}))
    if flip < len(whole):
        whole[flip] = byte
    try:
        found = parse(bytes(whole[: len(whole) - cut]), "x.safetensors", LIMITS)
        arrays = [tensor.read() for tensor in found.values()]
    except ValueError:
        return  # anything else, an IndexError say, would fail the test
    assert sum(array.nbytes for array in arrays) == 24


def test_the_header_decides_before_the_data_is_read(tmp_path, monkeypatch):
    """A sparse file of 3 GB took 18 s and 3 GB to be refused."""
    monkeypatch.setattr(folder, "_read_hashed", None)
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 2) + b"{}")
        file.truncate(3 << 30)
    with pytest.raises(ValueError, match="belong to none"):
        read_file(folder.AdapterFolder(tmp_path), "x.safetensors", 4 << 30, LIMITS)


def test_a_file_that_changed_after_its_header_was_read_is_read_as_it_is_now():
    old, new = (safetensors.numpy.save({"x": np.full(2, value, np.float32)}) for value in (1, 2))
    shorter = safetensors.numpy.save({"y": np.ones(1, np.float32)})
    header = read_header(lambda at, n: old[at : at + n], len(old), "f", LIMITS)
    assert parse(new, "f", LIMITS, header)["x"].read()[0] == 2
    assert list(parse(shorter, "f", LIMITS, header)) == ["y"]


def test_limits_of_a_model():
    limits = FileLimits().for_model(max_tensors=4, max_data_bytes=8)
    assert (limits.max_header_bytes, limits.max_tensors) == (1 << 20, 4)
    with pytest.raises(ValueError, match="12 bytes; 8 are the most"):
        parse(safetensors.numpy.save({"x": np.ones(3, np.float32)}), "f", limits)
    text = b'{"a":[' + b"0," * 70_000 + b"0]}"
    with pytest.raises(ValueError, match="more than 65536 JSON values"):
        parse(struct.pack("<Q", len(text)) + text, "f", limits)


def test_names_are_read_from_the_header_alone(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(made({"__metadata__": {"a": "b"}, "x": entry(), "y": {}}))
    assert tensor_names(file) == ("x", "y")
    for wrong in (b"", made(b"[1]"), b"\xff" * 8 + b"{}", made(b"[" * 100_000)):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"header|Expecting value"):
            tensor_names(file)
