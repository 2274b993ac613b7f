"""Patterns of module names mean what they mean to PEFT, in linear time."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.adapters.formats.peft_pattern import Pattern

NAME = "base.model.layers.11.self_attn.q_proj"
# As PEFT, its users and its tests write them.
WRITTEN = [
    *("q_proj", "model.layers.1.mlp.up_proj", r"model\.layers\.11\.self_attn\.q_proj"),
    *(r".*\.self_attn.*", "^model.layers.1.mlp.up_proj", "q_proj|k_proj", r"layers\.\d+\.mlp"),
    *(r".*\.(q_proj|v_proj)", r"(?:q|k|v)_proj$", r"layers\.(1[0-9]|2[0-3])\..*", "q_proj$"),
    *(r".*layers\.[0-9]+\.self_attn\.[qkv]_proj", r".*\.experts\.\d{1,3}\.(up|down)_proj"),
    *(r"model\.layers\.(?:0|[1-9]\d*)\..+", ".*.*.*.*", "(a+)+b", r"[^.]*_proj", "", "a|"),
    *(r"\w+", r"\D+", r"[\d_a-c-]+x?", "^(a|^b)$", "a$|b", "(^|x)a", r"a\-b", r"[\]]", r"[a\-z]"),
]


def reference(pattern: str, name: str) -> bool:
    """What PEFT's get_pattern_key asks."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize("pattern", WRITTEN)
def test_written_patterns_match_as_in_re(pattern):
    names = [NAME, "q_proj", "xq_proj", "model.layers.1.mlp.up_proj", "layers.1.mlp", "ab", "a", ""]
    names += [
        "b",
        "xa",
        "a-b",
        "]",
        "x.experts.12.up_proj",
        "model.layers.0.x",
        ".",
        "a.",
        "-",
        "٣",
    ]
    ours = Pattern(pattern)
    assert [ours.match(name) for name in names] == [reference(pattern, name) for name in names]


CHARS = st.sampled_from("ab.1_")
ATOMS = st.one_of(
    CHARS.filter(lambda char: char != "."),
    st.sampled_from(
        [".", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[a-b1]", r"[\d.]", "^", "$"]
    ),
)
SUFFIX = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, SUFFIX).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(ATOMS.filter(lambda a: a not in "^$"), SUFFIX).map("".join),
    ),
    max_leaves=8,
)


@settings(max_examples=500)
@given(pattern=PATTERNS, name=st.text("ab.1_", max_size=8))
def test_what_is_read_means_what_re_means(pattern, name):
    assert Pattern(pattern).match(name) == reference(pattern, name)
