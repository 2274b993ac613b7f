"""Patterns of module names that are not read are refused with the reason."""

import pytest

from lora_jax.adapters.formats.peft_pattern import Pattern, PatternRefused


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        *(("(?=a)b", "group"), ("(?P<x>a)", "group"), (r"(a)\1", r"\\1"), (r"\bq", r"\\b")),
        *(("a++", "gives nothing back"), ("a**", "repeated"), ("(", r"\("), ("a)", r"\)")),
        *(("[a", "ends too early"), ("[[a]]", "class"), ("[b-a]", "empty"), ("*a", "nothing")),
        *(("a{", "count"), ("a{3,2}", "wrong way"), ("a{5000}", "1024 places"), ("^*", "repeated")),
        *(("(" * 21 + ")" * 21, "nested"), ("a" * 513, "513 characters"), ("a\\", "too early")),
        *(("((a{30}){30}){30}", "places"), (r"[\d-z]", "range"), (r"\x41", r"\\x")),
        *((r"[a-\d]", "range"), ("[a-[b]]", "class in a class"), (r"[z-\.]", "is empty")),
    ],
)
def test_the_rest_is_refused_with_the_reason(pattern, why):
    with pytest.raises(PatternRefused, match=why):
        Pattern(pattern)


def test_an_end_of_a_range_may_be_escaped():
    pattern = Pattern(r"[+-\-]q")
    assert [bool(pattern.match(name)) for name in ("+q", ",q", "-q", ".q")] == [True] * 3 + [False]
