"""Reasons for vLLM's flags: each once, and no other."""

from collections import Counter

from serving.cli.foreign_flags import vllm_facts
from serving.cli.foreign_reasons import (
    ALWAYS_SO,
    OLDER_ALWAYS_SO,
    OLDER_REFUSED,
    OLDER_SWITCHES,
    REFUSED,
)


def test_each_row_is_about_a_flag_of_vllm_and_no_flag_has_two():
    facts = {form: f.flag for f in vllm_facts() for form in (*f.positive, *f.negative)}
    forms = [key.split()[0] for key in ALWAYS_SO]
    forms += [form for flags in REFUSED.values() for form in flags.split()]
    assert [form for form in forms if form not in facts] == []
    twice = [flag for flag, n in Counter(facts[form] for form in forms).items() if n > 1]
    assert twice == []


def test_older_flags_are_not_among_the_new_ones():
    known = {form for fact in vllm_facts() for form in (*fact.positive, *fact.negative)}
    assert not known & {key.split()[0] for key in OLDER_ALWAYS_SO}
    refused = [form for forms in OLDER_REFUSED.values() for form in forms.split()]
    assert not known & set(refused)
    assert len(refused) == len(set(refused))
    assert set(refused) >= set(OLDER_SWITCHES.split())
