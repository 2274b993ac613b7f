"""A description says what the registry and the device know."""

from types import SimpleNamespace
from typing import Any

from serving.engine.adapter_info import adapter_info


def test_a_description_names_what_is_on_the_device():
    report = SimpleNamespace(max_rank=8, weight_bytes=640)
    entry: Any = SimpleNamespace(name="sql", kind="lora", report=report, pinned=True, digest="abc")
    here, away = adapter_info(entry, {"abc"}), adapter_info(entry, ())
    assert (here.name, here.rank, here.bytes, here.pinned) == ("sql", 8, 640, True)
    assert (here.resident, away.resident) == (True, False)
