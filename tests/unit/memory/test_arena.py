"""Arrays in an arena: in place for every importer, counted once, and never to be written."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from lora_jax.memory.arena import Arena, ImportedArena, parse_manifest
from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import MappingError
from lora_jax.memory.wire import ShareError

VALUES = {
    "embedding": np.arange(3000, dtype=np.float32).reshape(60, 50),
    "norm": np.full((7,), 2.5, ml_dtypes.bfloat16),
    "layer#codes": np.arange(5000, dtype=np.uint8).reshape(5, 10, 100),
}


@pytest.fixture
def arena():
    memory = HostMemory("none")
    made = Arena(memory, 1 << 17)
    for name, values in VALUES.items():
        np.testing.assert_array_equal(np.asarray(made.add(name, values)), values)
    yield made
    made.close()
    assert memory.usage().created == 0


def imported(arena, memory=None) -> ImportedArena:
    fds = arena.export()
    try:
        fields = arena.manifest.fields()
        return ImportedArena(memory or HostMemory("none"), parse_manifest(fields), fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_importers_see_the_same_arrays_in_place(arena):
    memory = HostMemory("none")
    there = imported(arena, memory)
    for name, values in VALUES.items():
        array = there.array(name, values.shape, values.dtype)
        assert array.unsafe_buffer_pointer() in there.span
        np.testing.assert_array_equal(np.asarray(array), values)
        array.delete()
    assert there.changed() == []
    assert (memory.usage().created, memory.usage().mapped) == (0, arena.manifest.num_bytes)
    there.close()
    assert memory.usage().mapped == 0


def test_blocks_hold_hardly_more_than_the_arrays(arena):
    used = sum(values.nbytes for values in VALUES.values())
    assert used < arena.manifest.num_bytes <= used + 3 * 256 + HostMemory().granularity


def test_digest_is_that_of_the_bytes(arena):
    again = Arena(HostMemory("none"), 1 << 17)
    for name, values in VALUES.items():
        again.add(name, values if name != "norm" else values + 1)
    same = {n for n, leaf in again.manifest.leaves.items() if leaf == arena.manifest.leaves[n]}
    assert same == VALUES.keys() - {"norm"}
    assert again.manifest.digest != arena.manifest.digest
    assert parse_manifest(arena.manifest.fields()).digest == arena.manifest.digest
    again.close()


def test_changed_bytes_are_named():
    """By the owner's own hand: nobody else can."""
    memory = HostMemory("none")
    arena = Arena(memory, 1 << 14)
    for name in "ab":
        arena.add(name, np.zeros(8, np.float32))
    there = imported(arena)
    memory.write(arena._address + arena.manifest.leaves["b"].offset, np.ones(1, np.uint8))
    assert there.changed() == ["b"]
    there.close()
    arena.close()


IMPORTER = """
import ctypes, os, sys
from lora_jax.memory.arena import ImportedArena, parse_manifest
from lora_jax.memory.host import HostMemory
import json
fields, fds = json.loads(sys.argv[1]), [int(fd) for fd in sys.argv[2:]]
arena = ImportedArena(HostMemory(), parse_manifest(fields), fds)
for fd in fds:
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        os.pwrite(again, b"x", 0)
        print("written")
    except PermissionError:
        print("refused")
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
print(mprotect(arena.span.start, 4096, 3), ctypes.get_errno(), flush=True)
ctypes.memset(arena.span.start, 1, 1)
print("written")
"""


def test_the_kernel_refuses_an_importer_every_write(arena):
    """By descriptor, by changed protection, and by address, which ends the importer alone."""
    fds = arena.export()
    command = [sys.executable, "-c", IMPORTER, json.dumps(arena.manifest.fields())]
    done = subprocess.run(
        [*command, *map(str, fds)], pass_fds=fds, capture_output=True, text=True, timeout=120
    )
    for fd in fds:
        os.close(fd)
    said = done.stdout.splitlines()
    assert said == ["refused"] * len(fds) + ["-1 13"], done.stderr
    assert done.returncode == -11
    there = imported(arena)
    assert there.changed() == []
    there.close()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [
        ("nothing", (7,), np.float32, "is not there"),
        ("norm", (8,), ml_dtypes.bfloat16, r"is bfloat16 \[7\]"),
        ("norm", (7,), np.float32, "same folder and dtype"),
    ],
)
def test_arrays_that_are_not_there_are_refused(arena, name, shape, dtype, words):
    there = imported(arena)
    with pytest.raises(ValueError, match=words):
        there.array(name, shape, np.dtype(dtype))
    there.close()


def test_arenas_take_no_more_than_was_reserved_and_no_name_twice(arena):
    with pytest.raises(MappingError, match="cannot hold"):
        arena.add("large", np.zeros(1 << 18, np.uint8))
    with pytest.raises(ValueError, match="'norm' is in the arena already"):
        arena.add("norm", np.zeros(1, np.uint8))


@pytest.mark.parametrize(
    "change",
    [
        {"layout": 2},
        {"blocks": []},
        {"blocks": [4096]},
        {"blocks": None},
        {"leaves": 3},
        {"leaves": {"a": [[4], "float32", 0, ""], "b": [[4], "float32", 8, ""]}},
        {"leaves": {"a": [[4], "float32", 0, ""], "b": [[4], "float32", 0, ""]}},
        {"leaves": {"a": [[-4], "float32", 0, ""]}},
        {"leaves": {"a": [[4], "no such", 0, ""]}},
        {"leaves": {"a": [[4], "float32", 0]}},
    ],
)
def test_manifests_that_make_no_sense_are_refused(arena, change):
    with pytest.raises(ShareError, match="manifest cannot be read"):
        parse_manifest(arena.manifest.fields() | change)


def test_descriptors_that_are_missing_or_too_small_are_refused(arena):
    memory, fds = HostMemory("none"), arena.export()
    with pytest.raises(ShareError, match=f"0 descriptors for {len(fds)} blocks"):
        ImportedArena(memory, arena.manifest, [])
    small = os.memfd_create("small")
    with pytest.raises(MappingError, match="no page of"):
        ImportedArena(memory, arena.manifest, [small] * len(fds))
    for fd in (*fds, small):
        os.close(fd)
    assert memory.usage().mapped == 0
