import queue

from bench.adapter_slots import Asked, summary


def asked(hit: bool, first: float) -> Asked:
    return Asked(hit, 0.0, queue.SimpleQueue(), first)


def test_hits_are_counted_apart():
    row = summary([asked(True, 0.001), asked(True, 0.003), asked(False, 0.5)])
    assert row["requests"] == 3
    assert abs(row["hit_share"] - 2 / 3) < 1e-9
    assert abs(row["hits_p50_ms"] - 2) < 1e-9
    assert row["p99_ms"] > 400 > 3.01 > row["hits_p99_ms"]
