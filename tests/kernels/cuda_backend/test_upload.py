"""Copies through pinned buffers, over a host library of the driver's symbols."""

import shutil
import threading
import weakref

import numpy as np
import pytest
from support.doubles.driver_double import cuda_double

from cuda_backend.upload import BUFFER_BYTES, BUFFERS, Uploader
from cuda_backend.vmm import CudaDriver
from lora_jax.memory.virtual import MappingError, OutOfPages

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    return cuda_double(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def uploader(double):
    device = CudaDriver(0, double.path)
    return Uploader(device._cuda, device._context)


def arrays(number: int, num_bytes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.integers(0, 256, num_bytes + n, np.uint8) for n in range(number)]


def begin(uploader: Uploader, values: np.ndarray) -> np.ndarray:
    """Begin to copy to memory that the double takes for a device's; return that."""
    target = np.zeros_like(values)
    uploader.begin(target.ctypes.data, values.ctypes.data, values.nbytes, values)
    return target


@pytest.mark.long
def test_more_pieces_than_buffers_arrive_whole(uploader):
    values = arrays(3, BUFFERS // 2 * BUFFER_BYTES + 3)
    targets = [begin(uploader, v) for v in values]
    uploader.finish()
    assert all(np.array_equal(t, v) for t, v in zip(targets, values, strict=True))


def test_a_copy_that_fails_is_raised_once_and_the_next_ones_work(uploader, double):
    values = arrays(6, 1000)
    double.fail("copy", 2)
    for array in values:
        begin(uploader, array)
    with pytest.raises(MappingError, match="cuMemcpyHtoDAsync"):
        uploader.finish()
    uploader.finish()
    target = begin(uploader, values[0])
    uploader.finish()
    assert np.array_equal(target, values[0])


def test_threads_may_begin_and_finish_at_the_same_time(uploader):
    found = []

    def load(seed):
        values = np.random.default_rng(seed).integers(0, 256, 100_000 + seed, np.uint8)
        target = begin(uploader, values)
        uploader.finish()
        found.append(np.array_equal(target, values))

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 8


def test_pinned_memory_is_copied_by_the_driver_alone(uploader, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    uploader.pin(values[1 << 20 :])
    monkeypatch.setattr(uploader, "_copy", None)  # the way through buffers
    target = begin(uploader, values[5:])
    uploader.finish()
    assert uploader.is_done()
    assert np.array_equal(target, values[5:])


def test_a_copy_keeps_pinned_memory_though_another_thread_has_just_waited(uploader, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    uploader.pin(values)
    target, kept, call = np.zeros_like(values), weakref.ref(values), uploader._call_in_context

    def finish_first(name, *arguments):
        uploader.finish()  # another thread's, when the copy is about to begin
        call(name, *arguments)

    monkeypatch.setattr(uploader, "_call_in_context", finish_first)
    uploader.begin(target.ctypes.data, values.ctypes.data, values.nbytes, values)
    monkeypatch.undo()
    want = values.copy()
    del values
    assert kept() is not None, "the driver may still copy out of it"
    uploader.finish()
    assert kept() is None
    assert np.array_equal(target, want)


@pytest.mark.parametrize("there_are", [0, 2])
def test_a_host_with_little_memory_has_fewer_buffers(double, monkeypatch, there_are):
    device, pinned, taken = CudaDriver(0, double.path), Uploader._pinned, []

    def few(uploader):
        if len(taken) == there_are:
            raise OutOfPages("cuMemHostAlloc answers CUDA_ERROR_OUT_OF_MEMORY (2)")
        taken.append(pinned(uploader))
        return taken[-1]

    monkeypatch.setattr(Uploader, "_pinned", few)
    if not there_are:
        with pytest.raises(OutOfPages, match="cuMemHostAlloc"):
            Uploader(device._cuda, device._context)
        return
    uploader = Uploader(device._cuda, device._context)
    values = arrays(6, 1000)
    targets = [begin(uploader, v) for v in values]
    uploader.finish()
    assert all(np.array_equal(t, v) for t, v in zip(targets, values, strict=True))
