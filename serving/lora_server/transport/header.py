"""The 64 bytes in front of every message: packed and read here, and by csrc/header.h. No jax.

Little-endian: magic u32, checksum u32, epoch u64, sequence u64, layer i32, site i32, rows i32,
kind i32, table_version i64, num_bytes u64, reserved u64 (0). The checksum is the CRC-32 of all 64
bytes with the checksum's own four as zero.
"""

import dataclasses
import enum
import struct
import zlib

MAGIC = 0x4C4A5401  # "LJT" and the version of this layout
LAYOUT = struct.Struct("<IIQQiiiiqQQ")
HEADER_BYTES = LAYOUT.size


class Kind(enum.IntEnum):
    """Kind of a message; a refusal has no rows and says that the server will not answer one."""

    REQUEST = 1
    RESPONSE = 2
    REFUSAL = 3


@dataclasses.dataclass(frozen=True)
class Header:
    """Header fields of a message; `num_bytes` counts the payload's real rows only."""

    epoch: int
    sequence: int
    layer: int
    site: int
    rows: int
    kind: int
    table_version: int
    num_bytes: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        fields = (
            self.epoch,
            self.sequence,
            self.layer,
            self.site,
            self.rows,
            self.kind,
            self.table_version,
            self.num_bytes,
        )
        data = LAYOUT.pack(MAGIC, 0, *fields, 0)
        return data[:4] + zlib.crc32(data).to_bytes(4, "little") + data[8:]


def parse(data: bytes) -> Header | None:
    """Return what 64 bytes say, or None unless magic, checksum and length are right."""
    if len(data) != HEADER_BYTES:
        return None
    magic, checksum, *fields, reserved = LAYOUT.unpack(data)
    if magic != MAGIC or reserved or zlib.crc32(data[:4] + bytes(4) + data[8:]) != checksum:
        return None
    return Header(*fields)
