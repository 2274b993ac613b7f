"""Pages of a backbone in the agent's hands: a backup loads them, and only equal ones take over."""

import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.processes.process_facts import open_files
from support.waiting import wait_until

from lora_jax.memory.wire import receive_fds, receive_header, send_fds, send_header
from serving.functions import published
from serving.functions.published import Published

LEAVES = {"embedding": [[4], "float32", 0, "00"]}


class Loads:
    """Stands for `processes.spawn`: threads that load, or end before, in the order given."""

    def __init__(self, *leaves):
        self.left, self.threads = list(leaves), []

    def spawn(self, module):
        assert module == "serving.functions.backbone"
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self.load, args=(theirs, self.left.pop(0)))
        thread.start()
        self.threads.append(thread)
        return SimpleNamespace(wait=lambda seconds: thread.join(60), pid=0), ours

    def load(self, connection, leaves):
        with connection:
            order = receive_header(connection)
            if leaves is None:  # as a process that is killed
                return
            if isinstance(leaves, str):
                send_header(connection, {"error": leaves})
                return
            memory = os.memfd_create("pages")
            manifest = {"blocks": [4096], "leaves": leaves, "model": order["model"]}
            send_header(connection, {"manifest": manifest, "device": "cpu"})
            send_fds(connection, [memory])
            os.close(memory)
            receive_header(connection)


def loads(monkeypatch, *leaves) -> Published:
    monkeypatch.setattr(published, "spawn", Loads(*leaves).spawn)
    return Published("/model", None)


def sent(pages) -> tuple[dict, int]:
    """Return the order that a function gets, and the inode of its page."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pages.send(ours, {"name": "law"})
        order = receive_header(theirs)
        (fd,) = receive_fds(theirs, 1)
        inode = os.fstat(fd).st_ino
        os.close(fd)
        return order, inode


def test_a_backup_loads_what_the_first_process_did_not(monkeypatch):
    pages = loads(monkeypatch, None, LEAVES)
    order, _ = sent(pages)
    assert (order["name"], order["manifest"]["leaves"]) == ("law", LEAVES)
    assert (pages.num_bytes, pages.device) == (4096, "cpu")
    pages.close()
    pages.close()


@pytest.mark.parametrize(
    ("leaves", "error", "words"),
    [((None, None), ConnectionError, "ended before"), (("no folder",), ValueError, "no folder")],
)
def test_two_deaths_and_a_model_that_cannot_be_shared_are_errors(monkeypatch, leaves, error, words):
    with pytest.raises(error, match=words):
        loads(monkeypatch, *leaves)


def test_equal_pages_take_over_and_others_are_refused(monkeypatch):
    pages = loads(monkeypatch, LEAVES, LEAVES, {"embedding": [[4], "float32", 0, "11"]})
    _, first = sent(pages)
    pages.renew()
    _, second = sent(pages)
    assert first != second
    with pytest.raises(ValueError, match="have changed since they were loaded"):
        pages.renew()
    assert sent(pages)[1] == second
    pages.close()


def test_condemned_pages_are_sent_to_nobody(monkeypatch):
    pages = loads(monkeypatch, LEAVES, {"embedding": [[4], "float32", 0, "11"]}, LEAVES)
    _, first = sent(pages)
    held = open_files()
    pages.condemn("Bytes have changed.")
    closed = [name for _, name in held - open_files() if "memfd:pages" in name]
    assert len(closed) == 1, "new pages need the memory of these"
    with pytest.raises(ValueError, match="have changed since they were loaded"):
        pages.renew()
    with pytest.raises(ConnectionError, match=r"Bytes have changed\. The files of /model"):
        sent(pages)
    pages.condemn("Bytes have changed.")
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(sent(pages)[1]))
    thread.start()  # a start meanwhile waits for the new pages
    pages.renew()
    thread.join(60)
    assert waiting
    assert waiting != [first]
    pages.close()


def test_a_start_that_waits_for_new_pages_ends_with_the_agent(monkeypatch):
    pages = loads(monkeypatch, LEAVES)
    pages.condemn("Bytes have changed.")
    errors = queue.SimpleQueue()

    def start() -> None:
        try:
            sent(pages)
        except ConnectionError as error:
            errors.put(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: pages._lock._waiters)
    pages.close()
    assert errors.get(timeout=60) == "The backbone is closed."
    thread.join(60)


def test_a_start_that_waits_for_pages_that_do_not_load_is_told_why(monkeypatch):
    changed = {"embedding": [[4], "float32", 0, "11"]}
    pages = loads(monkeypatch, LEAVES, changed)
    pages.condemn("Bytes have changed.")
    with ThreadPoolExecutor() as pool:
        start = pool.submit(sent, pages)
        wait_until(lambda: pages._lock._waiters)
        before = open_files()
        with pytest.raises(ValueError, match="have changed since"):
            pages.renew()
        with pytest.raises(ConnectionError, match=r"Bytes have changed\. The files of /model"):
            start.result(60)
    assert not [name for _, name in open_files() - before if "memfd:pages" in name]
    pages.close()


def test_pages_that_come_after_the_end_are_closed(monkeypatch):
    pages = loads(monkeypatch, LEAVES, LEAVES)
    pages.close()
    before = open_files()
    pages.renew()
    assert open_files() <= before


def test_a_process_that_reads_nothing_holds_up_no_other_and_keeps_no_old_pages(monkeypatch):
    pages = loads(monkeypatch, LEAVES, LEAVES)
    stuck, other = socket.socketpair()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    failed = queue.SimpleQueue()

    def send() -> None:
        try:
            pages.send(stuck, {"name": "x" * (1 << 20)})
        except OSError as error:
            failed.put(error)

    with stuck, other, ThreadPoolExecutor() as pool:
        sending = pool.submit(send)
        wait_until(lambda: pages._pages.senders)
        assert pool.submit(sent, pages).result(60)[0]["name"] == "law"
        held = open_files()
        assert stuck in pages.condemn("Bytes have changed.")
        assert open_files() == held  # the send under way may still pass them on
        stuck.shutdown(socket.SHUT_RDWR)  # as the agent does with users of old pages
        sending.result(60)
        assert isinstance(failed.get(timeout=60), OSError)
        assert len([name for _, name in held - open_files() if "memfd:pages" in name]) == 1
        pages.renew()
    pages.close()
