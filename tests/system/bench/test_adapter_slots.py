import contextlib
import gc
import queue

from bench import adapter_slots
from bench.adapter_slots import Asked, Case, summary


def asked(hit: bool, first: float) -> Asked:
    return Asked(hit, 0.0, queue.SimpleQueue(), first)


def test_hits_are_counted_apart():
    row = summary([asked(True, 0.001), asked(True, 0.003), asked(False, 0.5)])
    assert row["requests"] == 3
    assert abs(row["hit_share"] - 2 / 3) < 1e-9
    assert abs(row["hits_p50_ms"] - 2) < 1e-9
    assert row["p99_ms"] > 400 > 3.01 > row["hits_p99_ms"]


def test_no_collection_of_a_server_s_objects_stops_the_threads(monkeypatch):
    """One of all objects takes 0.15 s, and so was the P99 of the times that are measured."""
    frozen = []
    monkeypatch.setattr(adapter_slots, "write_adapters", lambda *_: [])
    monkeypatch.setattr(adapter_slots, "Engine", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(adapter_slots, "measure", lambda *_: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    adapter_slots.on_shipped_model(Case())
    assert frozen[0] > 10_000
    assert not gc.get_freeze_count()
