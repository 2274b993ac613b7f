"""The all-gather kernels on a CPU: two to four emulated GPUs."""

import ctypes
import shutil
import threading

import numpy as np
import pytest

pytestmark = [
    pytest.mark.long,  # test_emulated.py has a case of the emulator
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRIVER = "gather.cc"
UNIT = 16
PATIENCE_MS = 30_000
WHOLE, COLUMNS, ROWS, OWNED = range(4)  # GatherParts


class Gpus:
    """Memories of a group, and calls of the kernels on all its devices side by side."""

    def __init__(self, library: ctypes.CDLL, devices: int):
        self.library, self.devices = library, devices
        size = library.gather_bytes_of(devices)
        self.memories = [np.zeros(size // 16 + 1, np.complex128) for _ in range(devices)]
        pointers = [memory.ctypes.data for memory in self.memories]
        self._memory = (ctypes.c_void_p * devices)(*pointers)

    def gather(self, parts, present=None, patience_ms: int = PATIENCE_MS, what=WHOLE):
        """Return what each device has after one call; `present` names those that take part.

        Of COLUMNS and of ROWS it is an all-to-all.
        """
        rows, units = parts[0].shape[0], parts[0].shape[1] // UNIT
        rows //= self.devices if what == ROWS else 1
        units //= self.devices if what == COLUMNS else 1
        outs = [np.full((rows, units * UNIT * self.devices), 0xAB, np.uint8) for _ in parts]
        self._run(parts, outs, (rows, units), patience_ms, what, present=present)
        return outs

    def take_owned(self, parts, sources, owner):
        """Return each device's columns of the owners' rows; `sources` are by device."""
        units = parts[0].shape[1] // UNIT // self.devices
        outs = [np.full((len(owner), units * UNIT), 0xAB, np.uint8) for _ in parts]
        self._run(parts, outs, (len(owner), units), PATIENCE_MS, OWNED, sources, owner)
        return outs

    def _run(self, parts, outs, sizes, patience_ms, what, sources=None, owner=None, present=None):
        """Call all devices' kernels side by side."""

        def run(me):
            x, y = (
                parts[me].ctypes.data_as(ctypes.c_void_p),
                outs[me].ctypes.data_as(ctypes.c_void_p),
            )
            where = self.devices, me, patience_ms, self._memory, what
            rest = (None, None) if sources is None else (sources[me], owner)
            rest = (None if a is None else a.ctypes.data_as(ctypes.c_void_p) for a in rest)
            self.library.all_gather(x, y, *sizes, *where, *rest)

        threads = [threading.Thread(target=run, args=(me,)) for me in present or range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def status(self, me: int) -> int:
        return self.library.gather_status(self.memories[me].ctypes.data_as(ctypes.c_void_p))


def parts_of(rng, devices: int, rows: int, units: int) -> list[np.ndarray]:
    return [rng.integers(0, 256, (rows, units * UNIT), np.uint8) for _ in range(devices)]


@pytest.fixture(autouse=True)
def _sizes(library):
    library.gather_bytes_of.restype = library.most_word_bytes.restype = ctypes.c_int64
    library.emulate(2, 1)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_device_gets_all_columns_in_every_round(library, devices):
    """By words and directly in turn, with more CTAs and fewer: all of them count all exchanges."""
    gpus, rng = Gpus(library, devices), np.random.default_rng(devices)
    words = library.most_word_bytes(devices) // UNIT
    large = 40 * words + 7
    shapes = [(1, 1), (3, 5), (1, words), (2, words), (5, 3), (1, large), (1, words + 1), (7, 9)]
    for rows, units in shapes * 2:
        parts = parts_of(rng, devices, rows, units)
        want = np.concatenate(parts, axis=1)
        for got in gpus.gather(parts):
            np.testing.assert_array_equal(got, want)
    assert not any(gpus.status(me) for me in range(devices))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_device_gets_its_columns_of_all(library, devices):
    """All-to-all in turn with all-gathers, in the same slots."""
    gpus, rng = Gpus(library, devices), np.random.default_rng(devices)
    words = library.most_word_bytes(devices) // UNIT
    for rows, units in [(1, 1), (5, 3), (1, words + 5), (4, 2)] * 2:
        parts = parts_of(rng, devices, rows, units * devices)
        blocks = [part.reshape(rows, devices, -1) for part in parts]
        for me, got in enumerate(gpus.gather(parts, what=COLUMNS)):
            want = np.concatenate([block[:, me] for block in blocks], axis=1)
            np.testing.assert_array_equal(got, want)
        for got in gpus.gather(parts):
            np.testing.assert_array_equal(got, np.concatenate(parts, axis=1))
    assert not any(gpus.status(me) for me in range(devices))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_device_gets_all_columns_of_its_rows(library, devices):
    gpus, rng = Gpus(library, devices), np.random.default_rng(devices)
    words = library.most_word_bytes(devices) // UNIT
    for rows, units in [(1, 1), (5, 3), (1, words + 5), (4, 2)] * 2:
        parts = parts_of(rng, devices, rows * devices, units)
        whole = np.concatenate(parts, axis=1)
        for me, got in enumerate(gpus.gather(parts, what=ROWS)):
            np.testing.assert_array_equal(got, whole[me * rows : (me + 1) * rows])
        for got in gpus.gather(parts):
            np.testing.assert_array_equal(got, whole)
    assert not any(gpus.status(me) for me in range(devices))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_device_gets_its_columns_of_the_owners_rows(library, devices):
    """Each row of the result is written once, whatever its owner's x has it as."""
    gpus, rng = Gpus(library, devices), np.random.default_rng(devices)
    for own_rows, rows, units in [(1, 1, 1), (5, 9, 3), (64, 400, 40), (3, 2, 7)] * 2:
        parts = parts_of(rng, devices, own_rows, units * devices)
        owner = rng.integers(0, devices, rows, np.int32)
        sources = [rng.integers(0, own_rows, rows, np.int32) for _ in parts]
        taken = np.stack([parts[d][sources[d][r]] for r, d in enumerate(owner)])
        for me, got in enumerate(gpus.take_owned(parts, sources, owner)):
            width = units * UNIT
            np.testing.assert_array_equal(got, taken[:, me * width : (me + 1) * width])
        for got in gpus.gather(parts):
            np.testing.assert_array_equal(got, np.concatenate(parts, axis=1))
    assert not any(gpus.status(me) for me in range(devices))


@pytest.mark.parametrize("direct", [False, True])
def test_a_peer_that_does_not_come_is_named_and_waits_end(library, direct):
    units = library.most_word_bytes(2) // UNIT + direct
    gpus, rng = Gpus(library, 2), np.random.default_rng(0)
    parts = parts_of(rng, 2, 1, units)
    gpus.gather(parts)
    given_up = gpus.gather(parts, present=[0], patience_ms=20)[0]
    assert gpus.status(0) == 2  # 1 + the number of the lost one
    gpus.gather(parts, present=[0])  # with all its patience: nothing is awaited any more
    assert gpus.status(1) == 0
    before = given_up.copy()
    late = threading.Thread(target=gpus.gather, args=(parts, [1]))
    late.start()
    late.join(20)  # not its patience, if it is told
    if direct:
        assert not late.is_alive()
    np.testing.assert_array_equal(given_up, before)  # which may have another use by now
    assert gpus.status(1) == (1 if direct else 0)
    late.join()
