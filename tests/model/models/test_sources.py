"""Arrays made of checkpoint tensors: every box of every kind against plain numpy."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_jax.models import mxfp4
from lora_jax.models.checkpoint import SINGLE, Checkpoint
from lora_jax.models.sources import Mxfp4, Slice, Stack, Tensor, Transpose, Unflatten, weight

RNG = np.random.default_rng(0)
FUSED = RNG.standard_normal((4, 6, 10)).astype(np.float32)
FLAT = RNG.standard_normal((12, 5)).astype(np.float32)
SINGLES = [RNG.standard_normal((3, 7)).astype(np.float32) for _ in range(4)]
BLOCKS = RNG.integers(0, 256, (3, 8, 2, 16)).astype(np.uint8)
SCALES = RNG.integers(120, 132, (3, 8, 2)).astype(np.uint8)
DENSE = mxfp4.dequantize(BLOCKS, SCALES, np.dtype(np.float32))

CASES = {
    "tensor": (Tensor("fused"), FUSED),
    "stack": (Stack("e.{expert}.w", 4), np.stack(SINGLES)),
    "part": (Slice(Tensor("fused"), 1, 2, 5), FUSED[:, 2:5]),
    "last axis from the end": (Slice(Tensor("fused"), -1, 0, 4), FUSED[..., :4]),
    "every second": (Slice(Tensor("fused"), 2, 1, 10, 2), FUSED[..., 1::2]),
    "part of a part": (Slice(Slice(Tensor("fused"), 2, 1, 10, 2), 2, 1, 4), FUSED[..., 3:9:2]),
    "transpose": (Transpose(Tensor("fused")), FUSED.transpose(0, 2, 1)),
    "transposed halves": (
        Transpose(Slice(Tensor("fused"), 2, 0, 10, 2)),
        FUSED[..., ::2].transpose(0, 2, 1),
    ),
    "unflatten": (Unflatten(Tensor("flat"), 3), FLAT.reshape(3, 4, 5)),
    "part of each group": (
        Slice(Unflatten(Tensor("flat"), 3), 1, 1, 3),
        FLAT.reshape(3, 4, 5)[:, 1:3],
    ),
    "mxfp4": (Mxfp4("packed"), DENSE),
    "every second row of mxfp4": (Slice(Mxfp4("packed"), 1, 1, 8, 2), DENSE[:, 1::2]),
    "one mxfp4 matrix": (Mxfp4("matrix"), DENSE[0]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("sources")
    tensors = {f"e.{n}.w": single for n, single in enumerate(SINGLES)}
    tensors |= {"fused": FUSED, "flat": FLAT, "packed_blocks": BLOCKS, "packed_scales": SCALES}
    tensors |= {"matrix_blocks": BLOCKS[0].copy(), "matrix_scales": SCALES[0].copy()}
    save_file(tensors, folder / SINGLE)
    return Checkpoint(folder)


def test_parts_of_rows_have_a_device_form_and_parts_of_columns_have_none(files):
    packed = Mxfp4("packed")
    assert Slice(packed, 1, 1, 8, 2).form(files) == packed.form(files) is not None
    for source in (Slice(packed, 2, 0, 32), Slice(packed, -1, 0, 32), Transpose(packed)):
        assert source.form(files) is None


@pytest.mark.parametrize("name", CASES)
def test_boxes(files, name):
    source, want = CASES[name]
    assert source.shape(files) == want.shape
    rng = np.random.default_rng(1)
    for trial in range(25):
        index = tuple(range(n) for n in want.shape)
        if trial:
            bounds = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in want.shape]
            index = tuple(range(a, b) for a, b in bounds)
        part = want[tuple(slice(r.start, r.stop) for r in index)]
        out = np.full(part.shape, np.nan, np.float32)
        source.read(files, index, out)
        np.testing.assert_array_equal(out, part)


def test_experts_of_several_shapes(tmp_path):
    save_file({"e.0.w": np.zeros((2, 3)), "e.1.w": np.zeros((3, 2))}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"several shapes: \[\(2, 3\), \(3, 2\)\]"):
        Stack("e.{expert}.w", 2).shape(Checkpoint(tmp_path))


def test_part_beyond_the_end(files):
    with pytest.raises(ValueError, match=r"fused has shape \(4, 6, 10\): axis 1 ends before 7"):
        Slice(Tensor("fused"), 1, 0, 7).shape(files)


def test_rows_that_do_not_divide(files):
    with pytest.raises(ValueError, match="flat: 12 rows do not divide into 5"):
        Unflatten(Tensor("flat"), 5).shape(files)


def test_rules_fill_in_what_the_path_says():
    rule = weight(
        "layers.{layer}.attn.{map}.{kind}", "h.{layer}.{map}.{kind}", Stack("{layer}.{expert}", 2)
    )
    first, second = rule.match("layers.12.attn.q_proj.bias")
    assert list(first.names()) == ["h.12.q_proj.bias"]
    assert list(second.names()) == ["12.0", "12.1"]
    assert rule.match("layers.x.attn.q_proj.bias") == ()
    assert rule.match("layers.1.attn.q_proj.inner.bias") == ()
    assert weight("norm.weight", "n").match("normXweight") == ()
