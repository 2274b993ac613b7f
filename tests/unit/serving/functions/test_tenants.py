"""Tenants as their agent sees them: deaths apart, the engine's end, and what does not start."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.processes.process_facts import open_files
from support.waiting import wait_until

from lora_jax.memory.wire import receive_fds, receive_header, send_fds, send_header
from serving.functions import tenants as module
from serving.functions.tenants import Tenants

ABOUT = {"max_model_len": 64, "tenants": {"max_rank": 8}, "start_s": 0.0, "private_bytes": 1}


class Processes:
    """Answers the orders of `Tenants` with threads in place of processes."""

    def __init__(self):
        self.orders, self.calls = [], queue.SimpleQueue()
        self.ends: dict[str, socket.socket] = {}  # the last of each name
        self.all: list[socket.socket] = []
        self.refuses = False

    def launch(self, order, *, backbone=True):
        self.orders.append((order, backbone))
        ours, theirs = socket.socketpair()
        self.ends[order["name"]] = theirs
        self.all.append(theirs)
        if order.get("tenant"):
            memory = os.memfd_create("channel")
            send_fds(theirs, [memory] * 3)
            os.close(memory)
            about = {"report": {}, "epoch": order["last_epoch"], **ABOUT}
            return ours, 100 + len(self.orders), about
        threading.Thread(target=self.answer, args=(theirs,), daemon=True).start()
        return ours, 1, dict(ABOUT)

    def answer(self, connection):
        """The engine: takes tenants in, and never answers what is called "hang"."""
        try:
            while True:
                call = receive_header(connection)
                self.calls.put(call)
                if call["call"] == "sit":
                    for fd in receive_fds(connection, 3):
                        os.close(fd)
                if call["call"] == "http":  # under way until the other side closes it
                    (fd,) = receive_fds(connection, 1)
                    with socket.socket(fileno=fd) as http:
                        http.recv(1)
                answer = {"id": call["id"], "value": call.get("adapter")}
                if call["call"] == "sit" and self.refuses:
                    answer = {"id": call["id"], "error": "ValueError", "text": "no seat"}
                if call["call"] != "hang":
                    send_header(connection, answer)
        except OSError:
            return


@pytest.fixture
def processes():
    made = Processes()
    yield made
    for end in made.all:
        end.close()


@pytest.fixture
def tenants(processes):
    made = Tenants(processes.launch, apart=True)
    yield made
    made.close()


def read(tenant):
    thread = threading.Thread(target=tenant.read, daemon=True)
    thread.start()
    return thread


def test_functions_share_one_engine_and_say_their_adapter(processes, tenants):
    law, base = tenants.start("law", "/adapters/law"), tenants.start("base", None)
    assert [backbone for _, backbone in processes.orders] == [True, False]
    assert law.send({"call": "generate"}).get(timeout=20)["value"] == "law"
    assert base.send({"call": "generate"}).get(timeout=20)["value"] is None
    assert (law.is_idle, base.is_idle) == (True, True)
    assert law.pid != base.pid == tenants.engine.pid
    law.close()
    read(law).join(20)
    base.close()
    read(base).join(20)


def test_a_channel_s_descriptors_pass_through_the_agent_and_do_not_stay(processes, tenants):
    before = open_files()
    law = tenants.start("law", "/a/law")
    processes.calls.get(timeout=20)
    wait_until(lambda: not [name for _, name in open_files() - before if "channel" in name])
    law.close()
    read(law).join(20)


def test_a_tenants_death_answers_its_own_calls_alone(processes, tenants):
    law, summary = tenants.start("law", "/a/law"), tenants.start("summary", "/a/summary")
    reading = read(law)
    hanging, other = law.send({"call": "hang"}), summary.send({"call": "hang"})
    assert not law.is_idle
    assert not law.end_if_idle()
    processes.ends["law"].close()
    assert hanging.get(timeout=20)["error"] == "FunctionDied"
    reading.join(20)
    assert law.send({"call": "generate"}) is None
    assert (other.empty(), summary.is_idle) == (True, False)
    said = [processes.calls.get(timeout=20) for _ in range(5)]
    assert [call["call"] for call in said] == ["sit", "sit", "hang", "hang", "leave"]
    assert said[-1]["epoch"] == law.about["epoch"] < summary.about["epoch"]
    summary.close()
    read(summary).join(20)


def test_a_tenant_that_does_not_answer_the_engine_is_ended(processes, tenants):
    """As one that hangs: the engine says so with the call that failed, and by its epoch."""
    law = tenants.start("law", "/a/law")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    law._process = os.pidfd_open(child.pid)
    engine = processes.ends["engine"]
    send_header(engine, {"id": 10**6, "error": "FunctionDied", "tenant": "law", "epoch": 0})
    answers = law.send({"call": "hang"})
    send_header(
        engine, {"id": 1, "error": "FunctionDied", "tenant": "law", "epoch": law.about["epoch"]}
    )
    assert answers.get(timeout=20)["error"] == "FunctionDied"
    # Whoever has this answer may call again at once: that call must not go to the dead process.
    assert law.send({"call": "generate"}) is None
    assert child.wait(20) == -signal.SIGKILL
    read(law).join(20)


def test_with_the_engine_all_end_and_the_next_start_makes_a_new_one(processes, tenants):
    law = tenants.start("law", "/a/law")
    reading, hanging = read(law), law.send({"call": "hang"})
    processes.ends["engine"].shutdown(socket.SHUT_RDWR)
    assert hanging.get(timeout=20)["error"] == "FunctionDied"
    reading.join(20)
    assert law.ended
    again = tenants.start("law", "/a/law")
    names = [order["name"] for order, _ in processes.orders]
    assert names == ["engine", "law", "engine", "law"]
    again.close()
    read(again).join(20)


def test_a_tenant_that_the_engine_refuses_does_not_start(processes, tenants):
    processes.refuses = True
    with pytest.raises(ValueError, match="'law' cannot start: no seat"):
        tenants.start("law", "/a/law")
    tenants.close()


def test_without_isolation_the_engine_reads_the_adapter(processes):
    tenants = Tenants(processes.launch, apart=False)
    law = tenants.start("law", "/a/law")
    assert processes.calls.get(timeout=20)["folder"] == "/a/law"
    assert law.pid == tenants.engine.pid
    law.close()
    read(law).join(20)
    tenants.close()


def test_an_engine_that_had_answered_ends_without_its_tenants_fault(tenants, processes):
    for calls in (0, 1):
        law = tenants.start("law", "/adapters/law")
        for _ in range(calls):
            assert law.send({"call": "generate"}).get(timeout=60)["value"] == "law"
        reading = read(law)
        processes.ends["engine"].shutdown(socket.SHUT_RDWR)
        reading.join(60)
        assert law.ended
        assert law.ended_by_others is bool(calls)


def test_a_function_without_calls_lets_go_and_with_the_last_one_the_engine(processes, tenants):
    law, base = tenants.start("law", "/a/law"), tenants.start("base", None)
    engine = tenants.engine
    assert law.end_if_idle()
    assert not law.end_if_idle()  # it has ended
    assert law.send({"call": "generate"}) is law.connect() is None
    assert not engine.ended
    read(law).join(20)
    while not engine.is_idle:  # it lets the adapter go
        time.sleep(0.01)
    assert base.end_if_idle()
    read(base).join(20)
    assert engine.ended
    assert tenants.engine is None


def test_a_connection_to_a_tenant_is_one_to_the_engine_under_its_name(processes, tenants):
    law = tenants.start("law", "/a/law")
    with law.connect() as http:
        assert not law.is_idle
        assert http.fileno() > 0
    until = time.monotonic() + 20
    while not law.is_idle and time.monotonic() < until:
        time.sleep(0.01)
    assert law.is_idle
    law.close()
    read(law).join(20)


def test_after_the_agents_end_nothing_starts(processes, tenants):
    tenants.close()
    with pytest.raises(ConnectionError, match="The agent is closed"):
        tenants.start("law", "/a/law")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "engine of the backbone ended while a function started"),
        ([], r"did not take 'law' in within 0.01 s"),
        ([{"error": "FunctionDied"}], "engine of the backbone ended while a function started"),
    ],
)
def test_an_engine_that_does_not_take_a_tenant_in_says_why(answers, message, monkeypatch):
    monkeypatch.setattr(module, "_SIT_S", 0.01)
    given = None if answers is None else queue.SimpleQueue()
    for answer in answers or ():
        given.put(answer)
    with pytest.raises(ConnectionError, match=message):
        module._taken_in("law", given)


def test_a_tenant_whose_engine_ended_meanwhile_is_closed_at_once(processes, tenants, monkeypatch):
    law = tenants.start("law", "/a/law")
    monkeypatch.setattr(module.Tenants, "_running_engine", lambda self: law.engine)
    reading = read(law)
    processes.ends["engine"].shutdown(socket.SHUT_RDWR)
    reading.join(20)
    late = module.Tenant(law.engine, "late", None, None, 1, {})
    assert tenants._keep(late) is late
    assert late.ended
    assert late.send({"call": "generate"}) is None
