"""Experts in virtual tensors: the same bits as before, adapters behind them, no page too many."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import tiny_esft
from support.cases.quantised_checkpoints import MOE, write_pair
from support.cases.tiny_checkpoint import TinyShape, write_model
from support.drivers.model_driver import Driver, fill_slots, highest_rank, random_sites

from lora_jax.adapters.formats import esft_format
from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import OutOfPages
from lora_jax.models import load
from lora_jax.models.expert_tensors import ExpertTensors, expert_blocks, page_size

PROMPTS = [[5, 3, 60, 17, 17, 41, 2], [9, 9, 12, 40], [63, 1, 0, 7, 55, 23, 23, 11], [8, 8, 30]]
EXTRA = 8


class Case:
    """A model whose experts lie in virtual tensors, two adapters in them, and their oracles."""

    def __init__(self, root, kind):
        self.base = tiny_esft.write_moe(root / "base", kind)
        self.plain, config = load(self.base)
        self.model, self.config = load(self.base)
        self.memory = HostMemory("none")  # a read outside of an expert ends the process
        self.tensors = ExpertTensors(self.model, self.memory, extra=EXTRA)
        self.before = self.tensors.pages()
        self.driver = Driver(self.model, self.config)
        plain = Driver(self.plain, config)
        self.alone = {-1: [plain.run([prompt])[0] for prompt in PROMPTS]}
        first, second = tiny_esft.MOE_LAYERS[kind]
        chosen = {0: {first: (1, 4), second: (2,)}, 1: {second: (0, 2, 5)}}
        slots = len(chosen)
        self.tables = np.tile(np.arange(tiny_esft.EXPERTS, dtype=np.int32), (2, slots, 1))
        self.places = []
        for slot, experts in chosen.items():
            made = tiny_esft.write_esft_adapter(root / f"a{slot}", self.base, experts, slot)
            merged, _ = load(tiny_esft.write_merged(root / f"m{slot}", self.base, made))
            other = plain.with_weights_of(merged)
            self.alone[slot] = [other.run([prompt])[0] for prompt in PROMPTS]
            weights = esft_format.read(root / f"a{slot}", self.model.catalogue(config))
            self.put(slot, weights)

    def put(self, slot, weights):
        for layer, experts in weights.experts.items():
            for place, (expert, matrices) in enumerate(experts.items()):
                index = tiny_esft.EXPERTS + 4 * slot + place
                self.tensors.map(layer, index)
                for name, matrix in zip(PROJECTIONS, matrices, strict=True):
                    self.tensors.write(layer, index, name, matrix)
                self.tables[self.tensors.layers.index(layer), slot, expert] = index
                self.places.append((layer, index))


# To these tests mixtral is qwen3_moe with fewer norms.
@pytest.fixture(
    scope="module",
    params=[pytest.param("mixtral", marks=pytest.mark.slow), "qwen3_moe", "deepseek_v2"],
)
def case(request, tmp_path_factory):
    case = Case(tmp_path_factory.mktemp(request.param), request.param)
    yield case
    case.tensors.close()
    assert case.memory.usage().created == 0


def test_the_base_keeps_its_bits(case):
    for prompt, want in zip(PROMPTS, case.alone[-1], strict=True):
        np.testing.assert_array_equal(case.driver.run([prompt])[0], want)


def test_esft_rows_equal_merged_models_and_base_rows_the_base(case):
    owners = [0, -1, 1, 0]
    got = case.driver.run(PROMPTS, esft_slots=owners, tables=case.tables)
    for place, owner in enumerate(owners):
        np.testing.assert_array_equal(got[place], case.alone[owner][place])
        if owner >= 0:
            assert (got[place] != case.alone[-1][place]).any()


def test_lora_rows_in_the_same_batch_keep_their_bits(case):
    sites = random_sites(case.model.catalogue(case.config), seed=1)
    slots = fill_slots(case.model.catalogue(case.config), [sites])
    lora = {"adapters": slots, "max_rank": highest_rank(sites)}
    alone = Driver(case.plain, case.config).run([PROMPTS[1]], slots=[0], **lora)[0]
    kinds = {"slots": [-1, 0, -1, -1], "esft_slots": [1, -1, 0, -1]}
    got = case.driver.run(PROMPTS, **kinds, tables=case.tables, **lora)
    for place, want in enumerate((case.alone[1], None, case.alone[0], case.alone[-1])):
        np.testing.assert_array_equal(got[place], alone if want is None else want[place])


def test_float32_experts_are_rounded_as_the_loader_rounds(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    made = tiny_esft.write_esft_adapter(tmp_path / "a", base, {0: (2,)}, 1)
    model, config = load(base, dtype="bfloat16")
    merged, _ = load(tiny_esft.write_merged(tmp_path / "m", base, made), dtype="bfloat16")
    tensors = ExpertTensors(model, HostMemory(), extra=1)
    weights = esft_format.read(tmp_path / "a", model.catalogue(config))
    tensors.map(0, tiny_esft.EXPERTS)
    for name, matrix in zip(PROJECTIONS, weights.experts[0][2], strict=True):
        tensors.write(0, tiny_esft.EXPERTS, name, matrix)
        got = getattr(expert_blocks(model)[0], name)[...][tiny_esft.EXPERTS]
        want = getattr(expert_blocks(merged)[0], name)[...][2]
        assert got.dtype == "bfloat16"
        np.testing.assert_array_equal(got, want)
    tensors.close()


def test_pages_come_and_go_with_experts(case):
    tensors = case.tensors
    tensors.check_integrity()
    used = tensors.pages()
    assert used.used_bytes > used.base_bytes == case.before.used_bytes
    assert used.used_bytes == used.created_bytes == case.memory.usage().created
    layer, index = case.places[0]
    values = np.asarray(tensors._tensors[layer, "up_proj"].array[index])
    for place in case.places:
        tensors.unmap(*place)
    tensors.unmap(*case.places[0])  # has no memory any more: nothing happens
    assert tensors.pages().used_bytes == used.base_bytes
    tensors.check_integrity()
    for place in case.places:
        tensors.map(*place)
    tensors.write(layer, index, "up_proj", values)
    np.testing.assert_array_equal(tensors._tensors[layer, "up_proj"].array[index], values)
    assert tensors.pages() == used  # the freed pages, once more
    with pytest.raises(ValueError, match=r"Expert 0 of layer \d is the base's"):
        tensors.map(layer, 0)
    with pytest.raises(ValueError, match=r"Expert 0 of layer \d is no adapter's"):
        tensors.write(layer, 0, "up_proj", values)


class Meagre(HostMemory):
    """Has no memory left after a number of blocks."""

    def __init__(self, blocks):
        super().__init__("none")
        self.left = blocks

    def create_page(self, num_bytes):
        if not self.left:
            raise OutOfPages("the device is full")
        self.left -= 1
        return super().create_page(num_bytes)


@pytest.mark.parametrize("fails_at", range(1, 4))
def test_a_page_that_cannot_be_had_leaves_an_expert_nowhere(tmp_path, fails_at):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    memory = Meagre(10**6)
    tensors = ExpertTensors(load(base)[0], memory, extra=EXTRA)
    before = tensors.pages()
    tensors.map(0, 6)
    memory.left = fails_at - 1
    with pytest.raises(OutOfPages, match="the device is full"):
        tensors.map(0, 12)  # far from the page of the first
    assert tensors._mapped == {(0, 6)}
    tensors.check_integrity()
    for place in sorted(tensors._mapped):
        tensors.unmap(*place)
    assert tensors.pages().used_bytes == before.used_bytes
    tensors.close()
    assert memory.usage() == memory.usage().__class__(created=0, mapped=0)


def test_only_mapped_experts_of_adapters_are_written(tmp_path):
    """And what fails beside a write is raised once, when the writes are asked for."""
    tensors = ExpertTensors(
        load(tiny_esft.write_moe(tmp_path, "mixtral"))[0], HostMemory(), extra=2
    )
    layer, index, count = 0, tiny_esft.EXPERTS, tiny_esft.EXPERTS
    with pytest.raises(ValueError, match=f"Expert {count - 1} of layer 0 is the base's"):
        tensors.map_all(layer, [count - 1])
    matrix = np.ones(expert_blocks_shape(tensors, layer), np.float32)
    with pytest.raises(ValueError, match=f"Expert {index} of layer 0 is no adapter's"):
        tensors.write(layer, index, "up_proj", matrix)
    tensors.map_experts(layer, {0: index})
    tensors.write_array(layer, index, "up_proj", jnp.asarray(matrix))
    got = np.asarray(tensors._tensors[layer, "up_proj"].array[index])
    np.testing.assert_array_equal(got, matrix)

    def refuse():
        raise OutOfPages("a copy failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors._memory, "finish_writes", refuse)
        tensors.settle()
    with pytest.raises(OutOfPages, match="a copy failed"):
        tensors.finish_writes()
    tensors.finish_writes()
    tensors.unmap(layer, index)
    tensors.close()


def expert_blocks_shape(tensors: ExpertTensors, layer: int) -> tuple[int, ...]:
    """The shape of one expert's matrix up."""
    return tensors._tensors[layer, "up_proj"].array.shape[1:]


def test_a_base_that_does_not_fit_gives_everything_back(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    memory = Meagre(5)
    with pytest.raises(OutOfPages):
        ExpertTensors(load(base)[0], memory, extra=EXTRA)
    assert memory.usage().created == 0


def test_budget_for_adapters_is_counted_beyond_the_base(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "mixtral")
    memory = HostMemory()
    tensors = ExpertTensors(load(base)[0], memory, extra=EXTRA, extra_bytes=3 * 4096)
    stats = tensors.pool.stats()
    assert (stats.budget - stats.in_use, stats.page_bytes) == (3, 4096)
    tensors.close()


def test_closed_tensors_cannot_be_read(tmp_path):
    model, _ = load(tiny_esft.write_moe(tmp_path / "base", "mixtral"))
    ExpertTensors(model, HostMemory(), extra=EXTRA).close()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(expert_blocks(model)[0].gate_proj[...])


def test_models_that_cannot_are_refused(tmp_path):
    write_model(tmp_path / "dense", TinyShape())
    with pytest.raises(ValueError, match="no experts"):
        ExpertTensors(load(tmp_path / "dense")[0], HostMemory(), extra=1)
    quantised, _ = write_pair(tmp_path, "int4", MOE)
    with pytest.raises(ValueError, match="Quantised experts cannot be replaced"):
        ExpertTensors(load(quantised)[0], HostMemory(), extra=1)


def test_page_size_follows_the_tensors():
    assert page_size(18_432, 4096) == 4096
    assert page_size(8 * 16_384, 4096) == 16_384
    assert page_size(1 << 30, 4096) == 2 << 20
    assert page_size(100, 2 << 20) == 2 << 20
