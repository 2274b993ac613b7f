"""The drawn adapters have what Table 1 prints of them."""

from bench import expert_cases as cases


def test_counts_are_those_of_the_table():
    counts = cases.table_1_counts()
    for name, (most, total) in cases.TABLE_1.items():
        assert (counts[name].max(), counts[name].sum()) == (most, total)
    assert sum(total for _, total in cases.TABLE_1.values()) == 1693
    assert cases.EXPERT_BYTES == 17_301_504  # 16.5 MiB
