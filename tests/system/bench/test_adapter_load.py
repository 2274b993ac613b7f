"""Each part of a load is timed, and few copies make an adapter."""

from bench import adapter_load


def test_every_part_of_a_load_is_timed(monkeypatch):
    monkeypatch.setattr(adapter_load, "LAYERS", 2)
    found = adapter_load.measure(2)
    assert set(found["ms"]) == set(adapter_load.PARTS)
    assert all(found["ms"][part] > 0 for part in (*adapter_load.OF_ENGINE, "keep"))
    assert found["adapter_bytes"] == 2 * 2 * 16 * (3 * 4096 + 1024)
    assert found["copies"] == len(
        {width for widths in adapter_load.SITES.values() for width in widths}
    )
