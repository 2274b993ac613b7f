"""The guide's tables for a model, and its sums done again."""

import pytest

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from serving.cli.guide import adapter_bytes, guide_lines, guide_sums

LAYERS = tuple(range(80))


def model(kv_width):
    widths = {"q_proj": 8192, "k_proj": kv_width, "v_proj": kv_width, "o_proj": 8192}
    modules = {name: LoraModule(name, 8192, wide, LAYERS) for name, wide in widths.items()}
    modules["lm_head"] = LoraModule("lm_head", 8192, 32000, (0,))
    return LoraCatalogue("llama", 80, modules, ())


def test_the_table_is_the_guides_where_all_heads_have_keys():
    """Its ranks, sizes and counts; with 8 KV heads an adapter is smaller."""
    lines = guide_lines(model(8192), 140_000_000_000, 2)
    assert "  16   | 168 MB     | 834                  | 59       | 0.39%" in lines
    assert "  4    | 41.9 MB    | 3,337                | 238      | 0.10%" in lines
    assert any("| 131 MB     | 1,068 " in line for line in guide_lines(model(1024), 14 * 10**10, 2))


def test_an_adapter_of_a_70b_model_takes_131_mb():
    """The guide says 168 MB, which assumes as many KV heads as heads."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert adapter_bytes(model(1024), 16, 2, attention) == 131_072_000
    assert adapter_bytes(model(1024), 32, 2, ("q_proj",)) == 80 * 32 * 2 * 8192 * 2
    with pytest.raises(ValueError, match="'x_proj'"):
        adapter_bytes(model(1024), 16, 2, ("x_proj",))


def test_sums_are_those_of_the_guides_assumptions():
    text = "\n".join(f"{said}: {true}" for said, true in guide_sums())
    for part in ("140 TB", "131 MB", "0.4%", "39.4 GB", "requests: 53%", "62% and 43%"):
        assert part in text
    for part in (
        "25% and 21%",
        "122,070 tokens, 305 requests",
        "1,750 GPUs",
        "$2,555,000",
        "$5,840",
    ):
        assert part in text
