"""Reads that are shared: one thread for each adapter, and a bounded wait for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.lora_server.shared_reads import SharedReads

WAIT_S = 30.0


@pytest.fixture
def slow():
    """A read that ends when it is let, and how often it has begun."""

    class Slow:
        begun, free, value, times = threading.Event(), threading.Event(), "part", 0

        def __call__(self):
            self.times += 1
            self.begun.set()
            assert self.free.wait(WAIT_S)
            if isinstance(self.value, Exception):
                raise self.value
            return self.value

    made = Slow()
    yield made
    made.free.set()


@pytest.mark.parametrize("value", ["part", ValueError("refused")], ids=["read", "refused"])
def test_who_asks_again_has_the_answer_of_the_read_under_way(slow, value):
    reads, slow.value = SharedReads(), value
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(reads.read, "folder", "digest", slow)
        assert slow.begun.wait(WAIT_S)
        second = pool.submit(reads.read, "folder", "digest", slow)
        assert reads.read("elsewhere", "digest", lambda: "own") == "own"
        assert reads.read("folder", "other", lambda: "own") == "own"
        slow.free.set()
        for answer in (first, second):
            if isinstance(value, Exception):
                assert answer.exception(WAIT_S) is value
            else:
                assert answer.result(WAIT_S) == value
    assert reads.read("folder", "digest", lambda: "anew") == "anew"
    assert slow.times <= 2  # the second may have asked after the first's end


def test_a_read_that_hangs_is_waited_for_from_its_beginning(slow):
    reads = SharedReads(limit_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(reads.read, "folder", "digest", slow)
        assert slow.begun.wait(WAIT_S)
        for _ in range(3):  # holds no thread, and begins no read
            with pytest.raises(ValueError, match=r"reading the adapter's folder folder for \d+ s"):
                reads.read("folder", "digest", slow)
        slow.free.set()
        assert first.result(WAIT_S) == "part"
    assert slow.times == 1
