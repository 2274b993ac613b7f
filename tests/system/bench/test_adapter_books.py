"""The bench of a miss's books: one adapter comes and one leaves, again and again; and reads."""

from bench import adapter_books


def test_each_part_is_counted():
    found = adapter_books.measure(known=12, on_host=4, misses=3)
    assert found["processor_ms"].keys() == {"resolve", "follow"}
    assert all(ms > 0 for ms in found["processor_ms"].values())


def test_a_known_layout_saves_time():
    """Even on a loaded machine: it takes about a quarter."""
    found = adapter_books.measure_reads(20)
    assert found["with_layout"] < found["without_layout"]
