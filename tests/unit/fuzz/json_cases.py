"""JSON as strangers write it: any value, and documents that are almost right."""

import json

from hypothesis import strategies as st

_EDGES = (0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 1.5, float("nan"), float("inf"), -0.0)
_WORDS = ("", "a", "*", ".*", "\ud800", "\0", "q_proj", "../..", "F32", "LORA", "é" * 40)

leaves = (
    st.none()
    | st.booleans()
    | st.sampled_from(_EDGES)
    | st.sampled_from(_WORDS)
    | st.text(max_size=20)
    | st.integers()
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
deep = st.sampled_from([b"[" * 12_000, b'{"a":' * 2_400, b"[" * 3000 + b"]" * 3000])


def texts(document):
    """Bytes of JSON documents, some cut off, some with a byte changed, some no JSON at all."""
    whole = document.map(lambda value: json.dumps(value).encode())
    cut = st.builds(lambda data, at: data[: at % (len(data) + 1)], whole, st.integers(0, 10**6))
    turned = st.builds(_turned, whole, st.integers(0, 10**6), st.integers(0, 255))
    return whole | whole | cut | turned | st.binary(max_size=80) | deep


def almost(right: dict):
    """The right document with some of its keys left out, changed or added to."""

    def change(edits: dict, gone: set) -> dict:
        return {key: value for key, value in (right | edits).items() if key not in gone}

    keys = st.sampled_from(sorted(right)) if right else st.text(max_size=8)
    edits = st.dictionaries(keys | st.text(max_size=8), values, max_size=3)
    return st.builds(change, edits, st.sets(keys, max_size=1))


def _turned(data: bytes, at: int, byte: int) -> bytes:
    at %= max(1, len(data))
    return data[:at] + bytes([byte]) + data[at + 1 :]
