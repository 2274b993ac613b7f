"""Catalogues of the base models."""

import dataclasses

from support.cases import adapter_cases as cases

from lora_jax.adapters.catalogue import EXPERT_MODULES


def test_widths_are_distinct_and_in_order():
    assert cases.llama().widths == (8, 12, 16, 20)
    assert cases.deepseek_v2().widths == (3, 4, 6, 8, 10, 12, 16, 24, 26)


def test_module_names_are_in_the_order_of_the_table():
    names = cases.moe().module_names
    assert list(names) == sorted(names)
    assert {"q_proj", "router", "experts.down_proj"} <= set(names)


def test_what_to_change_names_the_option_that_has_no_room():
    plain = cases.llama()
    assert plain.what_to_change("flag 3") == "start it with flag 3"
    bound = dataclasses.replace(plain, only_lora="tensor_parallel_size 2")
    said = "that does not go with tensor_parallel_size 2. Start one without it, with flag 3"
    assert bound.what_to_change("flag 3") == said


def test_a_catalogue_can_do_without_experts():
    whole = cases.moe(layers=2)
    rest = whole.without_experts()
    assert set(whole.modules) - set(rest.modules) == set(EXPERT_MODULES)
    assert rest.modules


def test_an_opened_catalogue_is_one_object_by_which_layouts_of_files_go():
    whole = cases.moe()
    assert whole.opened() is whole
    closed = whole.only(["q_proj"])
    assert closed.opened() is closed.opened()
    assert closed.opened() == whole
