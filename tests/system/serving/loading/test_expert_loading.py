"""Experts come in bounded pieces, show at last, and go when no step can read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import tiny_esft

from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertSizes
from lora_jax.adapters.formats import esft_format
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import MappingError, OutOfPages
from lora_jax.models import load
from lora_jax.models.expert_tensors import ExpertTensors, expert_blocks
from serving.loading import expert_loading
from serving.loading.expert_loading import ExpertRoom, identity_tables

CHOSEN = {0: (1, 4), 2: (0, 3, 5)}
SLOTS, MOST = 2, 4


class Case:
    def __init__(self, root):
        base = tiny_esft.write_moe(root / "base", "qwen3_moe")
        self.model, config = load(base)
        self.memory = HostMemory("none")
        self.tensors = ExpertTensors(self.model, self.memory, extra=SLOTS * MOST)
        sizes = ExpertSizes(self.tensors.layers, 6, MOST, self.tensors.expert_bytes)
        self.room = ExpertRoom(self.tensors, ExpertAllocator(SLOTS, sizes))
        self.tables = jnp.asarray(identity_tables(2, SLOTS, 6))
        self.weights = []
        for seed in range(2):
            tiny_esft.write_esft_adapter(root / f"a{seed}", base, CHOSEN, seed)
            self.weights.append(esft_format.read(root / f"a{seed}", self.model.catalogue(config)))

    def load(self, which=0, chunks=10**6):
        placement = self.room.allocator.place(self.weights[which])
        job = self.room.job(placement, self.tables)
        while not job.done:
            self.tables = job.advance(self.tables, chunks)
        self.room.allocator.finish_loading(placement.digest)
        return placement

    @property
    def used(self):
        pages = self.tensors.pages()
        return pages.used_bytes - pages.base_bytes


@pytest.fixture
def case(tmp_path):
    case = Case(tmp_path)
    yield case
    case.room.close()
    assert case.memory.usage().created == 0


def test_a_plan_maps_every_layer_writes_every_matrix_and_the_tables_last(case, monkeypatch):
    placement, calls = case.room.allocator.place(case.weights[0]), []
    for name in ("map_all", "begin_write"):
        real = getattr(case.tensors, name)
        monkeypatch.setattr(
            case.tensors, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))
        )
    job = case.room.job(placement, case.tables)
    num_matrices = 3 * case.weights[0].num_experts
    for left in range(len(CHOSEN) + num_matrices, 0, -1):
        assert (job.remaining, job.done) == (left + 1, False)
        tables = job.advance(case.tables, 1)
        assert tables is case.tables
    assert calls == ["map_all"] * len(CHOSEN) + ["begin_write"] * num_matrices
    assert job.remaining == 1
    tables = job.advance(case.tables, 1)
    assert (job.remaining, job.done) == (0, True)
    np.testing.assert_array_equal(tables[:, 0], placement.table)
    np.testing.assert_array_equal(tables[:, 1], case.tables[:, 1])
    assert tables.sharding == case.tables.sharding
    assert job.advance(tables, 1) is tables
    for layer, experts in placement.indices.items():
        block = expert_blocks(case.model)[layer]
        for expert, index in experts.items():
            matrices = case.weights[0].experts[layer][expert]
            for name, matrix in zip(PROJECTIONS, matrices, strict=True):
                np.testing.assert_array_equal(getattr(block, name)[...][index], matrix)


def test_a_large_matrix_counts_as_its_chunks(case, monkeypatch):
    monkeypatch.setattr(expert_loading, "CHUNK_BYTES", 1024)  # a matrix is 24 * 32 * 4 bytes
    job = case.room.job(case.room.allocator.place(case.weights[0]), case.tables)
    assert job.remaining == len(CHOSEN) + 3 * 5 * 3 + 1
    job.advance(case.tables, len(CHOSEN))
    job.advance(case.tables, 1)  # at least one matrix
    assert job.remaining == 3 * 5 * 3 + 1 - 3
    job.advance(case.tables, 5)
    assert job.remaining == 3 * 5 * 3 + 1 - 3 - 6


def test_memory_goes_a_few_experts_at_a_time(case, monkeypatch):
    monkeypatch.setattr(expert_loading, "FREED_AT_ONCE", 2)
    placement = case.load()
    case.room.allocator.retire(placement.digest)
    calls = -(-len(placement.places) // 2)
    for _ in range(calls - 1):
        assert case.room.collect(dispatched=1, read=1) == 0
        assert case.room.is_busy
        with pytest.raises(AssertionError, match="are still there"):
            case.room.check_integrity()
    assert case.room.collect(dispatched=1, read=1) == 1
    assert (case.used, case.room.is_busy) == (0, False)
    case.room.check_integrity()


def test_memory_goes_only_when_steps_have_been_read(case):
    case.load()
    assert case.used > 0
    case.room.allocator.retire(case.weights[0].digest)
    assert case.room.is_busy
    assert case.room.collect(dispatched=7, read=5) == 0
    assert case.room.collect(dispatched=9, read=6) == 0  # later steps do not matter
    assert case.used > 0
    with pytest.raises(AssertionError, match="wait for a step"):
        case.room.check_integrity()
    assert case.room.collect(dispatched=9, read=7) == 1
    assert (case.used, case.room.is_busy) == (0, False)
    case.room.check_integrity()
    case.load(1)
    case.room.allocator.retire(case.weights[1].digest)
    assert case.room.collect(dispatched=9, read=9) == 1  # nothing is in flight: at once
    assert case.used == 0
    assert case.room.collect(dispatched=0, read=0) == 0


ERRORS = [OutOfPages("full"), MappingError("odd"), OSError(5, "io")]


@pytest.mark.parametrize(
    ("fails_at", "error"),
    [
        pytest.param(place, error, marks=() if place == number else pytest.mark.long)
        for place in range(3)
        for number, error in enumerate(ERRORS)
    ],
)
def test_a_load_that_fails_gives_all_pages_back(case, monkeypatch, fails_at, error):
    case.load(1)
    before, tables, calls = case.used, case.tables, []

    def create_page(num_bytes):
        calls.append(num_bytes)
        if len(calls) > fails_at:
            raise error
        return HostMemory.create_page(case.memory, num_bytes)

    monkeypatch.setattr(case.memory, "create_page", create_page)
    placement = case.room.allocator.place(case.weights[0])
    job = case.room.job(placement, tables)
    with pytest.raises(LoadFailed) as caught:
        job.advance(tables, 10**6)
    assert caught.value.may_pass == isinstance(error, OutOfPages)
    case.room.allocator.abandon_loading(placement.digest)
    assert case.room.collect(3, 3) == 1
    assert case.used == before
    case.room.check_integrity()
    assert case.room.allocator.resident() == (case.weights[1].digest,)
    monkeypatch.undo()
    case.load(0)


def test_what_cannot_be_unmapped_is_said_and_nothing_stops(case, monkeypatch, caplog):
    placement = case.load()

    def refuse(address, num_bytes):
        raise RuntimeError("the driver is confused")

    monkeypatch.setattr(case.memory, "unmap", refuse)
    case.room.allocator.retire(placement.digest)
    assert case.room.collect(1, 1) == 1
    assert "could not be released" in caplog.text
    monkeypatch.undo()
    case.load(1)  # on the same indices
    np.testing.assert_array_equal(case.tables[:, 0], placement.table)
    case.room.allocator.retire(case.weights[1].digest)
    case.room.collect(1, 1)
    assert case.used == 0


def test_identity_tables_replace_nothing():
    tables = identity_tables(3, 2, 4)
    assert tables.shape == (3, 2, 4)
    assert tables.dtype == np.int32
    assert (tables == np.arange(4)).all()
    assert isinstance(jax.device_put(tables), jax.Array)
