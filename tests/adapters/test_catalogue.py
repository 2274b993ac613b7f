"""What a base model offers to adapters."""

import adapter_cases as cases


def test_widths_are_distinct_and_in_order():
    assert cases.llama().widths == (8, 12, 16, 20)
    assert cases.deepseek_v2().widths == (3, 4, 6, 8, 10, 12, 16, 24, 26)


def test_module_names_are_in_the_order_of_the_table():
    names = cases.moe().module_names
    assert list(names) == sorted(names)
    assert {"q_proj", "router", "experts.down_proj"} <= set(names)
