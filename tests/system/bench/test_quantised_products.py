"""The bench of products with quantised weights: every format beside bfloat16."""

from bench import quantised_products
from bench.quantised_model import FORMATS


def test_every_format_has_a_time_and_its_own_bytes(monkeypatch):
    monkeypatch.setattr(quantised_products, "COLD_BYTES", 1)
    monkeypatch.setattr(quantised_products, "TURN_SECONDS", 1e-4)
    rows = quantised_products.measure((16, 128), (3,), turns=1)
    by_base = {row["base"]: row for row in rows}
    assert set(by_base) == {"float32", "bfloat16", *FORMATS}
    assert all(row["us"] > 0 for row in rows)
    assert by_base["bfloat16"]["over_bfloat16"] == 1
    # 2,048 weights: e4m3 with a float32 scale for 128, int4 with a bfloat16 scale for 128
    assert by_base["fp8"]["bytes"] == 2048 + 4 * 16
    assert by_base["int4"]["bytes"] == 1024 + 2 * 16
