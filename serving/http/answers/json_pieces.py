"""JSON of large answers, piece by piece: one call for all would hold the interpreter lock."""

import json
from json.encoder import encode_basestring
from typing import Any

from fastapi.responses import Response

_PIECE = 2048  # entries of a list or object that one call writes
_CONTAINERS = (dict, list)
# `json.dumps` makes an encoder a call, unless it is asked for nothing.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Return the value as JSON in UTF-8, as `fastapi.responses.JSONResponse` writes it."""
    return text_json(value) if type(value) is str else b"".join(_pieces(value))


def text_json(text: str) -> bytes:
    """Return a text as `dumps` does."""
    return encode_basestring(text).encode()


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """Return an answer with the value as JSON."""
    return Response(dumps(value), headers=headers, media_type="application/json")


def _pieces(value: Any) -> list[bytes]:
    if not _is_large(value):
        return [_plain(value)]
    if isinstance(value, dict):
        pieces = [b"{"]
        for key, item in value.items():
            pieces += [b"," * (len(pieces) > 1), _plain(key), b":", *_pieces(item)]
        return [*pieces, b"}"]
    pieces = [b"["]
    for start in range(0, len(value), _PIECE):
        part = value[start : start + _PIECE]
        pieces.append(b"," * (start > 0))
        if any(map(_is_large, part)):
            for index, item in enumerate(part):
                pieces += [b"," * (index > 0), *_pieces(item)]
        else:
            pieces.append(_plain(part)[1:-1])
    return [*pieces, b"]"]


def _is_large(value: Any) -> bool:
    """Return whether a value may have more than a piece's entries."""
    if not isinstance(value, _CONTAINERS):
        return False
    if len(value) > _PIECE:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(_is_large(item) for item in items if isinstance(item, _CONTAINERS))


def _plain(value: Any) -> bytes:
    return _encode(value).encode()
