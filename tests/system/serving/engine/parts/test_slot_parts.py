"""Slots of an engine: sizes by the config or of the page pool, and what writes their rows."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.host_copier import HostCopier
from serving.api.config import EngineConfig
from serving.engine.memory.sizing import CacheSize
from serving.engine.parts import slot_parts

CONFIG = EngineConfig("m", max_loras=3, max_lora_rank=4)


@pytest.fixture
def base():
    catalogue = LoraCatalogue("llama", 1, {"q_proj": LoraModule("q_proj", 8, 6, layers=(0,))}, ())
    return SimpleNamespace(
        catalogue=catalogue,
        local_catalogue=catalogue,
        num_full_adapters=0,
        lora_share=0.1,
        usual_rank=None,
        dtype=jnp.dtype(jnp.float32),
        size=CacheSize(num_pages=6, page_size=4, max_model_len=12),
        esft=None,
        remote=None,
        split=None,
        widths=None,
        images=None,
        merged=None,
        norms=None,
        pool=None,
    )


def test_slots_are_as_many_as_the_config_says(base):
    made = slot_parts.make_slots(CONFIG, base, None, print)
    assert made.spec.num_slots == made.residencies.snapshot.slots_total == 3
    assert not made.bringing


def test_members_of_a_gang_have_the_slots_of_rank_0(base):
    gang = SimpleNamespace(shared=lambda spec: f"of rank 0: {spec.num_slots}", is_leader=False)
    assert slot_parts.make_slots(CONFIG, base, gang, print).spec == "of rank 0: 3"


@pytest.mark.parametrize("lacks", ["split", "merged", "images"])
def test_a_table_of_host_memory_needs_steps_that_alone_read_slots(base, lacks, monkeypatch):
    given = []
    monkeypatch.setattr(
        slot_parts, "make_residencies", lambda *_, **more: given.append(more["table"])
    )
    monkeypatch.setattr(slot_parts, "engine_copier", lambda **_: HostCopier())
    assert slot_parts.make_slots(CONFIG, base, None, print).copies_rows
    setattr(base, lacks, SimpleNamespace())
    made = slot_parts.make_slots(CONFIG, base, None, print)
    assert made.copies_rows == (lacks != "split")
    assert given[0] is not None
    assert given[1] is None
