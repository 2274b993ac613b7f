"""JSON in pieces is the JSON of one call."""

import pytest
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st

from serving.http.answers import json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('aé"\\', max_size=3),
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=9)
    ),
)


@given(value=VALUES, piece=st.integers(1, 4))
def test_pieces_are_the_whole(value, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "_PIECE", piece)
        assert json_pieces.dumps(value) == JSONResponse(value).body


def test_no_call_writes_more_than_a_piece(monkeypatch):
    sizes, encode = [], json_pieces._encode

    def counted(value: object) -> str:
        sizes.append(len(value) if isinstance(value, list) else 1)
        return encode(value)

    monkeypatch.setattr(json_pieces, "_encode", counted)
    json_pieces.dumps({"a": {"b": [[1] * 5000, "x", {"c": list(range(3000))}]}})
    assert max(sizes) == 2048


def test_answers():
    answer = json_pieces.json_response({"a": "é"})
    assert answer.media_type == "application/json"
    assert answer.body == '{"a":"é"}'.encode()
    with pytest.raises(ValueError, match="Out of range"):
        json_pieces.json_response({"a": float("nan")})
