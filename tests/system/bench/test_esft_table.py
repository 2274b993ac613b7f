"""Measured rows as tables of a page."""

from bench.esft_table import tables


def row(name, us, base_us, floor=None, base_floor=None, **more):
    return {
        "name": name,
        "us": us,
        "base_us": base_us,
        "adapters": 5,
        "floor_us": floor,
        "base_floor_us": base_floor,
        "more": {key.replace("_", " ") + " %": value for key, value in more.items()},
    }


def test_a_line_says_clock_kernels_and_bytes():
    same = row("decode, 8 rows, 5 adapters, same experts", 7.2e3, 7e3, 4e3, 4e3, over=0.31)
    same["more"] |= {"low %": 0.1, "high %": 0.5, "kernels over %": -0.02}
    own = row("decode, 8 rows, 5 adapters, own experts", 7.497e3, 7e3, 5e3, 4e3)
    virtual = row("virtual against padded, decode, 8 rows", 7e3, 7e3, over=-0.1, low=-0.2, high=0.0)
    steps, parts = tables(
        [same, own, virtual, row("load from disk to first use", 1.0, None)]
    ).split("\n\n")
    assert steps.splitlines()[2] == (
        "| decode, 8 rows | 5 | 7.00 ms | +0.31% (+0.10 to +0.50) | -0.02% | +7.1% | +25.0% |"
    )
    assert parts.splitlines()[2:] == [
        "| virtual against padded, decode, 8 rows | 5 | 7.00 ms | -0.10% (-0.20 to +0.00) | - |"
    ]
    assert all(line.count("|") == steps.count("|") // 3 for line in steps.splitlines())


def test_nothing_measured_is_two_heads():
    assert [len(table.splitlines()) for table in tables([]).split("\n\n")] == [2, 2]
