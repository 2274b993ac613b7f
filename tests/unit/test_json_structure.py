"""Values of JSON texts are counted as a JSON reader finds them."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_jax import json_structure
from lora_jax.json_structure import too_many_values

VALUES = st.recursive(
    st.none() | st.integers() | st.text('a"\\,[{}]', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('\\",[', max_size=4), inner)
    ),
)


def marks(value: object) -> int:
    """Commas, colons and opening brackets of a value outside of strings."""
    if isinstance(value, dict):
        return len(value) + marks(list(value.values()))
    if not isinstance(value, list):
        return 0
    return 1 + max(0, len(value) - 1) + sum(map(marks, value))


@given(value=VALUES, chunk=st.integers(1, 9), escapes=st.booleans())
def test_the_count_is_exact_wherever_chunks_end(value, chunk, escapes):
    text = json.dumps(value, ensure_ascii=escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_structure, "_CHUNK", chunk)
        most = 1 + marks(value)
        assert not too_many_values(text, most)
        assert too_many_values(text, most - 1) or most - 1 >= len(text)


def test_texts_count_as_one_value_whatever_is_in_them():
    assert not too_many_values(json.dumps(',[{"\\' * 10_000).encode(), 1)


def test_counting_stops_at_the_limit():
    data = b"[" + b"0," * (8 << 20) + b"0]"
    start = time.thread_time()
    assert too_many_values(data, 1000)
    assert time.thread_time() - start < 1
