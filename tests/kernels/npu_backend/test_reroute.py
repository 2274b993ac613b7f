"""Rerouting for an NPU: the Triton kernel in the interpreter, and plain torch, to the integer."""

import importlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lora_jax.ops.reroute import reference
from npu_backend import reroute as npu


def make_case(tokens, k, slots, experts, seed=0):
    """Ids and slots from one below to one above what there is, and some far from it."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    owners = rng.integers(-1, slots + 1, tokens).astype(np.int32)
    if tokens > 2:  # so far that an address made of them is outside the table
        ids[:2, 0], owners[1:3] = (-(10**9), 10**9), (10**9, -(10**9))
    table = rng.integers(0, experts + slots * 5, (slots, experts)).astype(np.int32)
    return ids, owners, table


def check_map(groups, case, live, num_groups) -> None:
    map = reference.reroute(*(jnp.asarray(a) for a in case), jnp.int32(live), num_groups)
    want = (map.order, map.inverse, map.group_sizes)
    for got, expected in zip(npu.row_map(groups, live, num_groups), want, strict=True):
        assert got.dtype == torch.int64  # as grouped matmul wants its counts
        np.testing.assert_array_equal(got.numpy(), np.asarray(expected))


@pytest.mark.parametrize("live", [1, 47, 50])
def test_plain_operators_are_the_references(live):
    case = make_case(50, 6, 4, 16)
    groups = npu.reroute_plain(*map(torch.from_numpy, case))
    check_map(groups, case, live, 16 + 4 * 5)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels as Triton's interpreter runs them, without a device."""
    pytest.importorskip("triton", reason="no Triton for this machine")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "npu_backend.reroute_kernel", raising=False)
    yield importlib.import_module("npu_backend.reroute_kernel")
    sys.modules.pop("npu_backend.reroute_kernel")


# One row; a block's end inside and at its border; a table that fills its cells; DeepSeek-V2-Lite.
@pytest.mark.parametrize(
    ("tokens", "k", "slots", "experts"),
    [
        (1, 1, 1, 1),
        (7, 2, 3, 8),
        (128, 2, 4, 16),
        (129, 2, 5, 3),
        (501, 6, 20, 64),
        (3, 2, 32, 256),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_kernel_is_the_plain_form(tokens, k, slots, experts):
    case = make_case(tokens, k, slots, experts)
    ids, owners, table = map(torch.from_numpy, case)
    got = npu.reroute(ids, owners.repeat_interleave(k), npu.pack(table))
    assert got.dtype == torch.int32
    assert torch.equal(got, npu.reroute_plain(ids, owners, table))


@pytest.mark.usefixtures("interpreted")
def test_the_kernels_groups_sort_as_the_references():
    case = make_case(50, 6, 4, 16)
    ids, owners, table = map(torch.from_numpy, case)
    groups = npu.reroute(ids, owners.repeat_interleave(6), npu.pack(table))
    check_map(groups, case, 47, 16 + 4 * 5)


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_writes_its_rows_only():
    """What lies after the last row, in the same block, stays."""
    ids, owners, table = map(torch.from_numpy, make_case(3, 2, 2, 4))
    room = torch.full((300,), -77, dtype=torch.int32)
    kernel = importlib.import_module("npu_backend.reroute_kernel").reroute_kernel
    packed = npu.pack(table)
    kernel[(2,)](ids, owners.repeat_interleave(2), packed, room, 6, 2, 4, BLOCK=256, CELLS=8)
    assert torch.equal(room[:6].view(3, 2), npu.reroute_plain(ids, owners, table))
    assert (room[6:] == -77).all()


def test_no_rows_need_no_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "npu_backend.reroute_kernel", None)
    packed = npu.pack(torch.zeros((1, 4), dtype=torch.int32))
    none = torch.zeros((0, 2), dtype=torch.int32)
    assert npu.reroute(none, none.reshape(-1), packed).shape == (0, 2)
    one = torch.zeros((1, 2), dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="needs triton-ascend"):
        npu.reroute(one, one.reshape(-1), packed)


@pytest.mark.parametrize(
    ("table", "error", "why"),
    [
        (torch.zeros((3, 4)), ValueError, r"float32\(3, 4\) must be integers"),
        (torch.zeros(4, dtype=torch.int32), ValueError, "2-D"),
        (torch.zeros((0, 4), dtype=torch.int32), ValueError, r"\(0, 4\)"),
        (torch.full((1, 4), -1), ValueError, r"outside \[0, 16777216\)"),
        (torch.full((1, 4), 1 << 24), ValueError, r"outside \[0, 16777216\)"),
        (torch.zeros((33, 256), dtype=torch.int32), NotImplementedError, "8192 cells, not 8448"),
    ],
)
def test_tables_that_the_kernel_cannot_hold_are_refused(table, error, why):
    with pytest.raises(error, match=why):
        npu.pack(table)


@pytest.mark.parametrize("wrong", ["topk_ids", "row_to_slot", "packed"])
def test_arrays_that_do_not_fit_are_named(wrong):
    arrays = {
        "topk_ids": torch.zeros((3, 2), dtype=torch.int32),
        "row_to_slot": torch.zeros(6, dtype=torch.int32),
        "packed": torch.zeros((2, 4)),
    }
    with pytest.raises(ValueError, match=f"reroute: {wrong} torch.int64"):
        npu.reroute(**(arrays | {wrong: arrays[wrong].long()}))
    with pytest.raises(ValueError, match=f"reroute: {wrong}"):
        npu.reroute(**(arrays | {wrong: arrays[wrong][None].contiguous()}))
