"""JSON of large answers, piece by piece: one call for all would hold the interpreter lock."""

import json
from typing import Any

from fastapi.responses import Response

_PIECE = 2048  # entries of a list or object that one call writes


def dumps(value: Any) -> bytes:
    """Return the value as JSON in UTF-8, as `fastapi.responses.JSONResponse` writes it."""
    return b"".join(_pieces(value))


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
    if isinstance(value, dict):
        return len(value) > _PIECE or any(map(_is_large, value.values()))
    return isinstance(value, list) and (len(value) > _PIECE or any(map(_is_large, value)))


def _plain(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
