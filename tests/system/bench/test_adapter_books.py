"""The bench of a miss's books brings one adapter and has one leave, again and again."""

from bench import adapter_books


def test_each_part_is_counted():
    found = adapter_books.measure(known=12, on_host=4, misses=3)
    assert found["processor_ms"].keys() == {"resolve", "follow"}
    assert all(ms > 0 for ms in found["processor_ms"].values())
