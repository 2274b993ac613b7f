"""A header says the same in Python and in C++, and a damaged one says nothing."""

import ctypes
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.lora_server.transport.header import HEADER_BYTES, MAGIC, Header, Kind, parse
from serving.lora_server.transport.library import calls

I32, I63 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    epoch=U64,
    sequence=U64,
    layer=I32,
    site=I32,
    rows=I32,
    kind=I32,
    table_version=I63,
    num_bytes=U64,
)
# (offset, bytes) of all fields but the checksum, in their order.
PLACES = [(0, 4), (8, 8), (16, 8), (24, 4), (28, 4), (32, 4), (36, 4), (40, 8), (48, 8), (56, 8)]
ONE = Header(1, 2, 3, 1, 5, Kind.REQUEST, 7, 8)


def read_by_cpp(data: bytes) -> bytes | None:
    """The 64 bytes as the C++ end has read them, or None where it drops them."""
    found = ctypes.create_string_buffer(HEADER_BYTES)
    return found.raw if calls().read(data, found) else None


@settings(deadline=None)
@given(HEADERS)
def test_both_ends_pack_and_read_alike(header):
    data = header.pack()
    assert len(data) == HEADER_BYTES == 64
    assert parse(data) == header
    assert read_by_cpp(data) == data
    unsealed = ctypes.create_string_buffer(bytes(8) + data[8:56] + b"\xff" * 8, HEADER_BYTES)
    calls().seal(unsealed)
    assert unsealed.raw == data


@settings(deadline=None)
@given(HEADERS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_is_found(header, bit):
    damaged = bytearray(header.pack())
    damaged[bit // 8] ^= 1 << bit % 8
    assert parse(bytes(damaged)) is None
    assert read_by_cpp(bytes(damaged)) is None


@settings(deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(data):
    assert (parse(data) is None) == (read_by_cpp(data) is None)


@settings(deadline=None)
@given(HEADERS, st.integers(0, HEADER_BYTES - 4), st.binary(min_size=4, max_size=4))
def test_a_field_written_over_is_found(header, at, new):
    data = header.pack()
    damaged = data[:at] + new + data[at + 4 :]
    assert (parse(damaged) is None) == (damaged != data)
    assert (read_by_cpp(damaged) is None) == (damaged != data)


def test_fields_lie_where_the_page_says():
    data = Header(1, 2, 3, 4, 5, 6, 7, 8).pack()
    found = [(at, int.from_bytes(data[at : at + size], "little")) for at, size in PLACES]
    assert found[0] == (0, MAGIC)
    assert [value for _, value in found[1:]] == [1, 2, 3, 4, 5, 6, 7, 8, 0]


@pytest.mark.parametrize("length", [0, 63, 65])
def test_other_lengths_are_no_header(length):
    assert parse((ONE.pack() * 2)[:length]) is None


def test_every_field_counts():
    packed = {ONE.pack()}
    for field in dataclasses.fields(Header):
        packed.add(dataclasses.replace(ONE, **{field.name: 9}).pack())
    assert len(packed) == 9
