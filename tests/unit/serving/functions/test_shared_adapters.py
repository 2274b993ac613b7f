"""One process with all adapters as its agent sees it: numbers, its end, and what is refused."""

import queue
import socket
import threading

import pytest
from support.waiting import wait_until

from lora_jax.memory.wire import receive_header, send_header
from serving.functions import shared_adapters as module
from serving.functions.shared_adapters import SharedAdapters, check_processes, shared_on
from serving.functions.tenants import Tenants

ABOUT = {"max_model_len": 64, "tenants": {"max_rank": 8}, "start_s": 0.0, "private_bytes": 1}
REPORT = {"weight_bytes": 12}


class Processes:
    """Answers orders with threads in place of processes."""

    def __init__(self):
        self.orders, self.calls = [], queue.SimpleQueue()
        self.ends: dict[str, socket.socket] = {}  # the last of each name
        self.all: list[socket.socket] = []

    def launch(self, order, *, backbone=True, programs=None):
        self.orders.append(order)
        ours, theirs = socket.socketpair()
        self.ends[order["name"]] = theirs
        self.all.append(theirs)
        args = theirs, order["name"]
        threading.Thread(target=self.answer, args=args, daemon=True).start()
        return ours, 1, dict(ABOUT)

    def answer(self, connection, name):
        try:
            while True:
                call = receive_header(connection)
                self.calls.put((name, call))
                answer = {"value": REPORT if call["call"] == "load" else None}
                if call.get("name") == "head":
                    answer = {"error": "ValueError", "text": "it is a task head"}
                if call.get("name") == "kills":
                    connection.shutdown(socket.SHUT_RDWR)
                if call["call"] != "hang":
                    send_header(connection, {"id": call["id"], **answer})
                if call["call"] == "leave":
                    send_header(connection, {"freed": 0})
        except OSError:
            return


@pytest.fixture
def processes():
    made = Processes()
    yield made
    for end in made.all:
        end.close()


@pytest.fixture
def tenants(processes, monkeypatch):
    monkeypatch.setattr(module, "_PLACE_S", 0.05)
    made = Tenants(processes.launch, apart=True, shared=SharedAdapters(lambda end: None, 2))
    yield made
    made.close()


def read(tenant):
    thread = threading.Thread(target=tenant.read, daemon=True)
    thread.start()
    return thread


def test_all_adapters_are_in_one_process_under_numbers_of_their_own(processes, tenants):
    law, summary = tenants.start("law", "/a/law"), tenants.start("summary", "/a/summary")
    assert [order["name"] for order in processes.orders] == ["engine", "adapters"]
    assert law.holder is summary.holder
    calls = [processes.calls.get(timeout=20) for _ in range(4)]
    loads = [call["number"] for name, call in calls if call["call"] == "load"]
    sits = [call["number"] for name, call in calls if call["call"] == "sit"]
    assert loads == sits
    assert len({number % 2 for number in loads}) == 2
    with pytest.raises(ValueError, match=r"All 2 places .* larger max_tenants"):
        tenants.start("third", "/a/third")


def test_the_process_ends_all_functions_and_is_started_again(processes, tenants):
    law, summary = tenants.start("law", "/a/law"), tenants.start("summary", "/a/summary")
    base = tenants.start("base", None)
    reading = [read(law), read(summary)]
    hanging = law.send({"call": "hang"})
    processes.ends["adapters"].shutdown(socket.SHUT_RDWR)
    assert hanging.get(timeout=20)["error"] == "FunctionDied"
    for one in reading:
        one.join(20)
    assert (law.ended, summary.ended, base.ended) == (True, True, False)
    assert base.send({"call": "generate"}).get(timeout=20)["value"] is None
    assert (law.ended_by_others, summary.ended_by_others) == (True, True)  # calls were answered
    again = tenants.start("law", "/a/law")
    assert not again.ended
    assert [order["name"] for order in processes.orders] == ["engine", "adapters", "adapters"]


def test_an_adapter_that_is_refused_takes_no_place(processes, tenants):
    for _ in range(3):
        with pytest.raises(ValueError, match="'head' cannot start: it is a task head"):
            tenants.start("head", "/a/head")
    with pytest.raises(ConnectionError, match="ended while a function started"):
        tenants.start("kills", "/a/kills")
    assert tenants.start("law", "/a/law").about["private_bytes"] == 12


def test_a_place_is_free_when_the_engine_says_so(processes, tenants):
    law = tenants.start("law", "/a/law")
    tenants.start("summary", "/a/summary")
    law.close()
    read(law).join(20)
    wait_until(lambda: 0 not in tenants._shared._taken.values())
    assert tenants.start("third", "/a/third").holder is law.holder


def test_with_the_engine_the_process_ends(processes, tenants):
    law = tenants.start("law", "/a/law")
    reading = read(law)
    processes.ends["engine"].shutdown(socket.SHUT_RDWR)
    reading.join(20)
    wait_until(lambda: tenants._shared.process is None)
    tenants.close()
    with pytest.raises(ConnectionError, match="The agent is closed"):
        tenants._shared._running({})


def test_devices_and_values_that_do_not_serve_it_are_refused(monkeypatch):
    end = lambda connection: None  # noqa: E731
    assert shared_on("cpu", None, end, 2) is None
    shared_on("cpu", "one", end, 2).close()
    monkeypatch.setattr(module, "count_visible", lambda visible: 1)
    with pytest.raises(ValueError, match=r"takes two GPUs.*sees 1 .*use isolation 'process'"):
        shared_on("gpu", None, end, 2)
    with pytest.raises(ValueError, match="'each' is for CPUs"):
        shared_on("gpu", "each", end, 2)
    with pytest.raises(ValueError, match="not on tpu"):
        shared_on("tpu", None, end, 2)
    monkeypatch.setattr(module, "count_visible", lambda visible: 2)
    shared_on("gpu", None, end, 2).close()
    with pytest.raises(ValueError, match="tenant_processes must be one of each, one, got 'two'"):
        check_processes("two", "server")
    with pytest.raises(ValueError, match="is for isolation 'server', not 'none'"):
        check_processes("one", "none")
    check_processes(None, "process")
