"""ESFT switch, its memory, and the errors where it cannot be on."""

import dataclasses
import logging

import pytest
from support.cases import tiny_checkpoint, tiny_esft

from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import OutOfPages
from lora_jax.models import load
from lora_jax.models.expert_tensors import expert_blocks
from serving.api.config import EngineConfig
from serving.engine.parts.parts import build_parts
from serving.loading import esft_parts
from serving.loading.esft_parts import make_esft


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_esft.write_moe(tmp_path_factory.mktemp("esft") / "base", "deepseek_v2")


def make(base, **fields):
    model, model_config = load(base)
    return model, make_esft(EngineConfig(str(base), **fields), model, model_config)


def test_by_default_a_model_with_experts_has_room_that_costs_nothing(base, caplog):
    with caplog.at_level(logging.INFO, logger="serving"):
        model, esft = make(base)
    assert esft is not None
    assert esft.tables.shape == (2, 16, 6)
    assert expert_blocks(model)[1].num_groups == 6 + 16 * 6
    pages = esft.room.tensors.pages()
    assert pages.used_bytes == pages.created_bytes == pages.base_bytes
    assert "ESFT adapters: 16, of up to 6 experts in each of 2 layers" in caplog.text
    esft.room.close()


def test_sizes_are_the_config_s(base):
    _, esft = make(base, max_esft_adapters=3, max_esft_experts=2, esft_memory_bytes=40960)
    assert esft is not None
    assert esft.room.allocator.num_slots == 3
    assert esft.room.tensors.extra == 6
    stats = esft.room.tensors.pool.stats()
    assert (stats.budget - stats.in_use) * stats.page_bytes == 40960
    assert esft.room.allocator.stats().bytes_total == 40960
    esft.room.close()


def test_off_means_no_trace(base):
    model, esft = make(base, max_esft_adapters=0)
    assert esft is None
    assert expert_blocks(model)[1].num_groups == 6


def test_what_cannot_be_is_off_by_default_and_refused_when_asked_for(
    base, tmp_path, monkeypatch, caplog
):
    dense = tmp_path / "dense"
    tiny_checkpoint.write_model(dense, tiny_checkpoint.TinyShape())
    assert make(dense)[1] is None
    with pytest.raises(
        ValueError, match=r"max_esft_adapters is 4, but .* \(llama\) has no experts"
    ):
        make(dense, max_esft_adapters=4)

    def nowhere(platform, device):
        raise NotImplementedError(f"no memory on {platform}")

    monkeypatch.setattr(esft_parts, "for_platform", nowhere)
    assert make(base)[1] is None
    with pytest.raises(ValueError, match="max_esft_adapters is 1, but no memory on cpu"):
        make(base, max_esft_adapters=1)
    monkeypatch.setattr(esft_parts.jax, "default_backend", lambda: "npu")
    with caplog.at_level(logging.INFO, logger="serving"):
        assert make(base)[1] is None  # not even looked for
    assert "ESFT adapters: none, on npu they must be asked for." in caplog.text
    with pytest.raises(ValueError, match="no memory on npu"):
        make(base, max_esft_adapters=1)


class CountedMemory(HostMemory):
    """A device of which so many bytes are free."""

    def __init__(self, free):
        super().__init__()
        self.free = free

    def usage(self):
        return dataclasses.replace(super().usage(), device_free=self.free)


def test_on_a_gpu_it_is_on_where_the_experts_fit_beside_what_jax_took(base, monkeypatch, caplog):
    blocks = expert_blocks(load(base)[0]).values()
    needed, spare = sum(3 * experts.gate_proj[...].nbytes for experts in blocks), 40960
    memory = CountedMemory(esft_parts.KEPT_FREE + needed + spare)
    monkeypatch.setattr(esft_parts, "for_platform", lambda platform, device: memory)
    monkeypatch.setattr(esft_parts.jax, "default_backend", lambda: "gpu")
    _, esft = make(base)
    assert esft is not None
    assert esft.room.allocator.stats().bytes_total == spare
    esft.room.close()
    memory.free -= spare + 5
    with caplog.at_level(logging.INFO, logger="serving"):
        assert make(base)[1] is None
    assert "ESFT adapters: none, the device lacks 5 bytes outside of jax's own" in caplog.text
    _, esft = make(base, max_esft_adapters=2)  # as asked for, base and nothing more
    assert esft is not None
    assert esft.room.allocator.stats().bytes_total == 0
    esft.room.close()


def test_a_base_that_finds_no_pages_is_refused(base, monkeypatch):
    memory = HostMemory()

    def full(num_bytes):
        raise OutOfPages("the device is full")

    monkeypatch.setattr(memory, "create_page", full)
    monkeypatch.setattr(esft_parts, "for_platform", lambda platform, device: memory)
    with pytest.raises(ValueError, match=r"no memory for the experts .* is full\. max_esft"):
        make(base)


def test_an_engine_that_cannot_start_gives_the_memory_back(base, tmp_path, monkeypatch):
    memory = HostMemory()
    monkeypatch.setattr(esft_parts, "for_platform", lambda platform, device: memory)
    tiny_esft.write_esft_adapter(tmp_path / "wide", base, {1: (0, 1, 2)}, 1)
    config = EngineConfig(str(base), max_esft_experts=2)
    with pytest.raises(
        ValueError, match=r"'wide': The adapter replaces 3 experts in layer 1; .* 2"
    ):
        build_parts(config, {"wide": tmp_path / "wide"})
    assert memory.usage().created == 0
    off = EngineConfig(str(base), max_esft_adapters=0)
    with pytest.raises(ValueError, match=r"'wide' is an ESFT adapter, but max_esft_adapters is 0"):
        build_parts(off, {"wide": tmp_path / "wide"})
