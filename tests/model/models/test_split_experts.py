"""Experts of a split model in virtual tensors: each device's own, and adapters' beside them."""

import jax
import numpy as np
import pytest
from support.cases import tiny_esft

from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import OutOfPages
from lora_jax.models import load
from lora_jax.models.expert_tensors import ExpertTensors, expert_blocks
from lora_jax.models.split import make_split
from lora_jax.models.split_experts import SplitExpertTensors

EXTRA, LAYER = 4, 0
OWN = tiny_esft.EXPERTS // 2


class Case:
    """A model over two devices whose experts lie in virtual tensors."""

    def __init__(self, folder, kind, **sizes):
        base = tiny_esft.write_moe(folder / "base", "qwen3_moe")
        self.whole, config = load(base)
        split = make_split(config, 2, expert_parallel=kind == "ep")
        self.model, _ = load(base, split=split)
        self.memories = [HostMemory("none", device=device) for device in range(2)]
        self.tensors = SplitExpertTensors(self.model, self.memories, split, extra=EXTRA, **sizes)
        self.kind = kind

    def parts(self, name, layer=LAYER):
        """What each device has of a weight."""
        param = getattr(expert_blocks(self.model)[layer], name)[...]
        return [shard.data for shard in param.addressable_shards]


@pytest.fixture(params=["ep", "tp"])
def case(request, tmp_path):
    case = Case(tmp_path, request.param)
    yield case
    case.tensors.close()
    assert [memory.usage().created for memory in case.memories] == [0, 0]


def test_every_device_has_its_part_of_the_base_in_its_own_memory(case):
    case.tensors.check_integrity()
    for name in PROJECTIONS:
        want = np.asarray(getattr(expert_blocks(case.whole)[LAYER], name)[...])
        axis = 0 if case.kind == "ep" else 1
        parts = case.parts(name)
        assert [part.devices() for part in parts] == [{d} for d in jax.devices()[:2]]
        for part, own in zip(parts, np.split(want, 2, axis), strict=True):
            assert part.shape == (len(own) + EXTRA, *own.shape[1:])
            base = np.stack([np.asarray(part[e]) for e in range(len(own))])
            np.testing.assert_array_equal(base, own)


def test_an_expert_lies_with_the_one_it_replaces(case):
    """Where experts are split, on every device in parts; and its memory goes with it."""
    before = [memory.usage().created for memory in case.memories]
    expert, index = OWN + 1, tiny_esft.EXPERTS + 2  # of the second device
    case.tensors.map_experts(LAYER, {expert: index})
    grown = [m.usage().created > b for m, b in zip(case.memories, before, strict=True)]
    assert grown == [case.kind == "tp", True]
    rng, matrices = np.random.default_rng(0), {}
    for name in PROJECTIONS:
        shape = getattr(expert_blocks(case.whole)[LAYER], name).shape[1:]
        matrices[name] = rng.normal(size=shape).astype(np.float32)
        case.tensors.begin_write(LAYER, index, name, matrices[name])
    case.tensors.finish_writes()
    case.tensors.check_integrity()
    for name, matrix in matrices.items():
        first, second = case.parts(name)
        if case.kind == "ep":
            np.testing.assert_array_equal(np.asarray(second[OWN + 2]), matrix)
        else:
            both = [np.asarray(part[index]) for part in (first, second)]
            np.testing.assert_array_equal(np.concatenate(both), matrix)
    case.tensors.unmap(LAYER, index)
    case.tensors.unmap(LAYER, index)  # once more is nothing
    case.tensors.trim()
    assert [memory.usage().created for memory in case.memories] == before
    with pytest.raises(ValueError, match=f"Expert {index} of layer {LAYER} is no adapter's"):
        case.tensors.begin_write(LAYER, index, "up_proj", matrices["up_proj"])


@pytest.mark.parametrize("case", ["tp"], indirect=True)
def test_a_refusal_of_one_device_leaves_the_others_as_they_were(case, monkeypatch):
    """An error of the system is raised when every device was tried."""
    first, second = case.tensors._parts
    before = case.tensors.pages()

    def refuse(*_):
        raise OutOfPages("the second device is full")

    index = tiny_esft.EXPERTS
    with monkeypatch.context() as patch:
        patch.setattr(second, "map_all", refuse)
        with pytest.raises(OutOfPages, match="second device"):
            case.tensors.map_experts(LAYER, {0: index})
    assert case.tensors.pages() == before
    case.tensors.map_experts(LAYER, {0: index})
    with monkeypatch.context() as patch:
        patch.setattr(first, "finish_writes", refuse)
        patch.setattr(first, "unmap", refuse)
        with pytest.raises(OutOfPages):
            case.tensors.finish_writes()
        with pytest.raises(OutOfPages):
            case.tensors.unmap(LAYER, index)
    assert (LAYER, index) not in second._mapped
    first.unmap(LAYER, index)
    case.tensors.check_integrity()
    assert case.tensors.matrix_bytes == first.matrix_bytes < case.tensors.expert_bytes


def test_a_base_that_does_not_fit_gives_everything_back(tmp_path, monkeypatch):
    def refuse(self, layer, name, param):
        raise OutOfPages("no base")

    monkeypatch.setattr(ExpertTensors, "move_in", refuse)
    with pytest.raises(OutOfPages, match="no base"):
        Case(tmp_path, "ep")


def test_without_memory_on_one_device_there_is_none_on_any(tmp_path):
    case = Case(tmp_path, "tp", extra_bytes=0)
    before = case.tensors.pages()
    with pytest.raises(OutOfPages):
        case.tensors.map_experts(LAYER, {0: tiny_esft.EXPERTS, 1: tiny_esft.EXPERTS + 3})
    assert case.tensors.pages() == before
    case.tensors.check_integrity()
    assert case.tensors.expert_bytes == sum(part[0].nbytes for part in map_first(case))
    case.tensors.close()


def map_first(case):
    """One device's part of each weight."""
    return [case.parts(name)[0] for name in PROJECTIONS]
