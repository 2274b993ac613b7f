"""Device memory of a function: measured once for its kind, taken at the start of the others."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from serving.functions import device_memory
from serving.runtime.program_files import ProgramFiles
from serving.steps.kept_steps import NotKept

FIELDS = {"kv_cache_memory_bytes": 4096, "max_loras": 1}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A GPU of 1,000 bytes, a model, files of programs, and the bounds that were set."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    bounds = []

    def bound(num_bytes, device_bytes):
        bounds.append((num_bytes, device_bytes))
        return True

    def files(**how):
        made = ProgramFiles(tmp_path, 1 << 20, **how)
        monkeypatch.setattr(device_memory, "step_files", lambda: (made, made))

    monkeypatch.setattr(device_memory.xla_memory, "bound", bound)
    monkeypatch.setattr(device_memory.xla_memory, "needed_bytes", lambda programs: 321)
    files()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    order = {"model": str(model), "fields": FIELDS, "device": "gpu", "name": "law"}
    usage = SimpleNamespace(device_used=600, device_free=400)
    memory = SimpleNamespace(usage=lambda: usage)
    return SimpleNamespace(order=order, memory=memory, bounds=bounds, files=files)


def share(world, sizes=None, **order) -> Any:
    return device_memory.share_of(world.order | order, sizes or {}, world.memory)


def test_what_a_maker_measured_bounds_others_of_its_kind(world):
    world.files(demands=True)
    with pytest.raises(NotKept, match="not known"):
        share(world).take()
    world.files(writes=True)
    share(world, {"max_lora_cls_labels": 3}, name="programs", fields=FIELDS).keep()
    world.files(demands=True)
    with pytest.raises(NotKept):  # another kind
        share(world).take()
    share(world, {"max_lora_cls_labels": 3}, name="summary").take()
    assert world.bounds == [(321, 1000)]


def test_a_process_whose_adapter_ran_out_of_memory_takes_more(world):
    world.files(writes=True)
    share(world).keep()
    world.files(demands=True)
    share(world, extra_bytes=79).take()
    assert world.bounds == [(400, 1000)]


def test_a_process_that_may_compile_starts_where_nothing_is_known(world):
    share(world).take()
    assert world.bounds == []


def test_a_device_that_does_not_say_what_is_used_bounds_nothing(world, monkeypatch):
    monkeypatch.setattr(device_memory.xla_memory, "needed_bytes", lambda programs: None)
    share(world).keep()
    world.files(demands=True)
    share(world).take()
    assert world.bounds == []


def test_a_bound_that_jax_does_not_take_is_said(world, monkeypatch, caplog):
    share(world).keep()
    monkeypatch.setattr(device_memory.xla_memory, "bound", lambda *given: False)
    share(world).take()
    assert "has no bound" in caplog.text


@pytest.mark.parametrize(
    "order",
    [{"device": "cpu"}, {"extra_bytes": None}, {"fields": {"max_loras": 1}}],
    ids=["a CPU", "too little before", "KV pages of any size"],
)
def test_others_take_what_they_need_when_they_do(world, order):
    assert share(world, **order) is None


def test_without_a_folder_of_programs_nothing_is_known(world, monkeypatch):
    monkeypatch.setattr(device_memory, "step_files", lambda: None)
    assert share(world) is None


def test_the_allocator_that_a_user_named_stays(world, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert share(world) is None
