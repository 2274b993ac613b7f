"""One process with all adapters as its agent sees it: numbers, its end, and what is refused."""

import os
import queue
import signal
import socket
import tempfile
import threading
from types import SimpleNamespace

import pytest
from support.waiting import wait_until

from lora_jax.memory.wire import receive_header, send_header
from serving.functions import shared_adapters as module
from serving.functions import tenants as tenants_module
from serving.functions.messages import DeviceFull
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
        self.sit = {"value": None}  # the engine's answer to it; None: it gives none
        self.starts = threading.Event()  # until then no process of adapters gets ready
        self.starts.set()

    def launch(self, order, *, backbone=True, programs=None):
        self.orders.append(order)
        if order["name"] == "adapters":
            assert self.starts.wait(20)
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
                if call["call"] == "sit":
                    answer = self.sit
                if answer is not None and "hang" not in (call["call"], call.get("folder")):
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
    with pytest.raises(DeviceFull, match=r"All 2 places .* larger max_tenants"):
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


def test_a_process_that_hangs_is_no_fault_of_its_functions_and_asked_for_nothing(
    processes, tenants, monkeypatch
):
    """Its end is seen some time after it was ended."""
    killed = []
    monkeypatch.setattr(
        tenants_module.signal, "pidfd_send_signal", lambda fd, number: killed.append(number)
    )
    law, summary = tenants.start("law", "/a/law"), tenants.start("summary", "/a/summary")
    assert law.send({"call": "generate"}).get(timeout=20)["value"] is None
    tenants._lose("law", law.about["epoch"])
    assert (law.ended_by_others, summary.ended_by_others) == (True, True)
    assert tenants.start("law", "/a/law").holder is not law.holder
    assert killed == [signal.SIGKILL]
    assert [order["name"] for order in processes.orders] == ["engine", "adapters", "adapters"]


def test_an_adapter_that_is_refused_takes_no_place(processes, tenants):
    for _ in range(3):
        with pytest.raises(ValueError, match="'head' cannot start: it is a task head"):
            tenants.start("head", "/a/head")
    with pytest.raises(ConnectionError, match="ended while a function started"):
        tenants.start("kills", "/a/kills")
    assert tenants.start("law", "/a/law").about["private_bytes"] == 12


def test_a_load_without_an_answer_ends_a_process_that_holds_nothing_else(
    processes, tenants, monkeypatch
):
    monkeypatch.setattr(module, "_LOAD_S", 0.05)
    with pytest.raises(ConnectionError, match=r"\(pid 1\) did not load 'law' within 0.05 s: see"):
        tenants.start("law", "hang")
    wait_until(lambda: tenants._shared.process is None)
    monkeypatch.setattr(module, "_LOAD_S", 20.0)
    law = tenants.start("law", "/a/law")
    monkeypatch.setattr(module, "_LOAD_S", 0.05)
    with pytest.raises(ConnectionError, match=r"If that lasts, end process 1"):
        tenants.start("summary", "hang")
    assert tenants._shared.process is law.holder
    assert len(tenants._shared._taken) == 1


def test_the_time_of_a_load_counts_from_the_last_answer(tenants, monkeypatch):
    """The process reads one adapter after the other."""
    shared, process = tenants._shared, SimpleNamespace(pid=1)
    now = iter([100.0, 101.0, 102.0, 103.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    waited = []

    class Answers:
        def get(self, timeout):
            waited.append(timeout)
            if len(waited) == 1:
                shared._heard = 101.5  # another load was answered meanwhile
                raise queue.Empty
            return {"value": 1}

    assert shared._answer_to_load("law", process, Answers()) == {"value": 1}
    assert waited == [module._LOAD_S - 1.0, module._LOAD_S - 0.5]


def test_an_engine_without_a_connection_to_the_process_may_be_asked_again(processes, tenants):
    """It comes to a process that has just ended: no fault of the adapter."""
    processes.sit = {"error": "TransportError", "text": "no answer", "retryable": True}
    with pytest.raises(ConnectionError, match="'law' cannot start: no answer"):
        tenants.start("law", "/a/law")
    processes.sit = {"value": None}
    assert not tenants.start("law", "/a/law").ended


def test_an_engine_that_takes_an_adapter_in_too_late_lets_it_go(processes, tenants, monkeypatch):
    monkeypatch.setattr(tenants_module, "_SIT_S", 0.05)
    processes.sit = None
    with pytest.raises(ConnectionError, match="did not take 'law' in"):
        tenants.start("law", "/a/law")
    calls = {}
    while "leave" not in calls:
        name, call = processes.calls.get(timeout=20)
        calls[call["call"]] = (name, call.get("epoch"))
    assert calls["sit"] == calls["leave"] == ("engine", 1)


def test_a_process_that_starts_while_the_agent_closes_ends_too(processes, tenants):
    processes.starts.clear()
    told = queue.SimpleQueue()

    def start():
        try:
            tenants.start("law", "/a/law")
        except ConnectionError as error:
            told.put(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    wait_until(lambda: len(processes.orders) == 2)
    tenants.close()
    processes.starts.set()
    thread.join(20)
    assert told.get(timeout=20) == "The agent is closed."
    wait_until(lambda: tenants._shared.process is None)


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


def test_its_socket_has_a_short_path_whatever_tmpdir_is(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    shared = SharedAdapters(lambda end: None, 2)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(shared.address)
    shared.close()
    assert not os.path.exists(os.path.dirname(shared.address))


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
