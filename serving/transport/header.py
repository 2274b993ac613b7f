"""The 64 bytes in front of every message: packed and read here, and by csrc/header.h. No jax.

Little-endian: magic u32, checksum u32, epoch u64, sequence u64, layer i32, site i32, rows i32,
kind i32, table_version i64, num_bytes u64, reserved u64 (0). The checksum is the CRC-32 of all 64
bytes with the checksum's own four as zero.
"""

import dataclasses
import enum
import zlib

import numpy as np

MAGIC = 0x4C4A5401  # "LJT" and the version of this layout
HEADER_BYTES = 64
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("checksum", "<u4"),
        ("epoch", "<u8"),
        ("sequence", "<u8"),
        ("layer", "<i4"),
        ("site", "<i4"),
        ("rows", "<i4"),
        ("kind", "<i4"),
        ("table_version", "<i8"),
        ("num_bytes", "<u8"),
        ("reserved", "<u8"),
    ]
)


class Kind(enum.IntEnum):
    """What a message is; a refusal has no rows and says that the server will not answer one."""

    REQUEST = 1
    RESPONSE = 2
    REFUSAL = 3


@dataclasses.dataclass(frozen=True)
class Header:
    """What a message says about itself; `num_bytes` counts the payload's real rows only."""

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
        record = np.zeros((), HEADER)
        record["magic"] = MAGIC
        for field in dataclasses.fields(self):
            record[field.name] = getattr(self, field.name)
        record["checksum"] = zlib.crc32(record.tobytes())
        return record.tobytes()


def parse(data: bytes) -> Header | None:
    """Return what 64 bytes say, or None unless magic, checksum and length are right."""
    if len(data) != HEADER_BYTES:
        return None
    record = np.frombuffer(data, HEADER)[0].copy()
    said = int(record["checksum"])
    record["checksum"] = 0
    if record["magic"] != MAGIC or record["reserved"] or zlib.crc32(record.tobytes()) != said:
        return None
    names = (field.name for field in dataclasses.fields(Header))
    return Header(**{name: int(record[name]) for name in names})
