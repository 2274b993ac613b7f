"""A function's answers to its agent: good calls and bad ones, seats, rehearsals, and its end."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import pytest
from support.waiting import wait_until

from lora_jax.memory.wire import close_all, receive_header, send_fds, send_header
from serving.api.outputs import RequestFailed
from serving.api.sampling import Sampling
from serving.functions import calls as function_calls
from serving.functions import rehearsal
from serving.functions.calls import Calls
from serving.lora_server.tenant_side import SeatsTaken

NO_MEMORY = "RESOURCE_EXHAUSTED: out of memory"
# Of an engine that sends traces: its function rehearses nothing, however long a test takes.
TRACED = SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317")


class NoEngine:
    """An engine that refuses everything."""

    config, end = TRACED, Future()

    def default_sampling(self):
        return Sampling(max_tokens=77)

    def generate(self, prompts, adapter, sampling):
        raise ValueError(f"{adapter} got {len(prompts)} prompts, {sampling[0].max_tokens}")

    def stream(self, prompt, adapter, sampling):
        raise ValueError(f"{adapter} got {prompt}, {sampling.max_tokens}")


class StuckEngine:
    """An engine whose answers for one adapter do not come before the end."""

    config, end = TRACED, Future()

    def __init__(self):
        self.go = threading.Event()

    def generate(self, prompts, adapter, sampling):
        if adapter == "busy":
            self.go.wait(60)
        return []


def test_calls_of_one_adapter_do_not_hold_up_those_of_others(monkeypatch):
    """More than are answered at a time, in an engine that adapters share."""
    monkeypatch.setattr(function_calls, "_CALLS", 2)
    ours, theirs = socket.socketpair()
    engine = StuckEngine()
    with ours, theirs:
        thread = threading.Thread(target=Calls(theirs, engine, None, None, None).answer)
        thread.start()
        ask = {"call": "generate", "prompts": ["a"], "sampling": [{}]}
        for number in range(5):
            send_header(ours, {"id": number, "adapter": "busy", **ask})
        send_header(ours, {"id": 5, "adapter": "other", **ask})
        assert receive_header(ours) == {"id": 5, "value": []}
        engine.go.set()
        assert {receive_header(ours)["id"] for _ in range(5)} == {*range(5)}
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_threads_of_an_adapter_that_left_end_when_they_have_answered(monkeypatch):
    """Else an engine would keep threads for every adapter that it ever had."""
    ours, theirs = socket.socketpair()
    engine = StuckEngine()
    monkeypatch.setattr(Calls, "_take", lambda calls, call: None)
    calling = {thread for thread in threading.enumerate() if thread.name.startswith("call")}
    with ours, theirs:
        thread = threading.Thread(target=Calls(theirs, engine, None, None, None).answer)
        thread.start()
        ask = {"call": "generate", "prompts": ["a"], "sampling": [{}]}
        send_header(ours, {"id": 0, "adapter": "busy", **ask})
        send_header(ours, {"id": 1, "call": "leave", "name": "busy", "epoch": 1})
        assert receive_header(ours) == {"id": 1, "value": None}
        its = {t for t in threading.enumerate() if t.name.startswith("call")} - calling
        assert len(its) == 1
        engine.go.set()
        assert receive_header(ours) == {"id": 0, "value": []}
        its.pop().join(60)
        send_header(ours, {"id": 2, "adapter": "busy", **ask})
        assert receive_header(ours) == {"id": 2, "value": []}
        calls = [t for t in threading.enumerate() if t.name.startswith("call")]
        assert len({*calls} - calling) == 1
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)


class DyingEngine:
    """An engine that dies of an error in a call, which then fails as if it may be tried again."""

    config = TRACED

    def __init__(self, error):
        self.end, self._error = Future(), error

    def generate(self, prompts, adapter, sampling):
        self.end.set_result(self._error)
        raise RequestFailed("The engine has stopped.", retryable=True)


@pytest.mark.parametrize(
    ("text", "is_bounded", "lacks"),
    [(NO_MEMORY, True, True), (NO_MEMORY, False, False), ("INTERNAL: a fault", True, False)],
)
def test_a_function_ends_with_its_engine_and_says_if_its_memory_was_too_small(
    text, is_bounded, lacks, monkeypatch
):
    """It would refuse every later call; what calls wait for is said by the connection's end."""
    monkeypatch.setattr(function_calls.xla_memory, "is_bounded", lambda: is_bounded)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = DyingEngine(jax.errors.JaxRuntimeError(text))
        calls = Calls(theirs, engine, None, "law", None)
        threads = [threading.Thread(target=one) for one in (calls.answer, calls.end_with_engine)]
        for thread in threads:
            thread.start()
        send_header(ours, {"id": 3, "call": "generate", "prompts": ["a"], "sampling": [{}]})
        if lacks:
            assert receive_header(ours) == {"lacks_memory": True}
        assert ours.recv(1) == b""
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_bad_calls_are_answered_and_the_next_ones_too():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = Calls(theirs, NoEngine(), None, "law", None)
        thread = threading.Thread(target=calls.answer)
        thread.start()
        for number, call in enumerate(
            [
                {"call": "no such"},
                {"call": "generate", "prompts": ["a"], "sampling": [{"temperature": -1}]},
                {"call": "generate", "prompts": ["a", "b"], "sampling": [{"max_tokens": 5}]},
            ]
        ):
            send_header(ours, {"id": number, **call})
            answer = receive_header(ours)
            assert (answer["id"], answer["error"]) == (number, "ValueError")
        assert answer["text"] == "law got 2 prompts, 5"
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert not thread.is_alive()


def test_a_call_without_sampling_has_the_model_s_default():
    """Of generation_config.json, as `Engine.generate` without one."""
    with answering(NoEngine()) as call:
        answer = call(call="generate", prompts=["a"], sampling=[None])
        assert answer["text"] == "law got 1 prompts, 77"
        answer = call(call="stream", prompts=["a"], sampling=[None])
        assert answer["text"] == "law got a, 77"


class Outputs:
    """An engine that streams two pieces, and a registry that remembers what it was told."""

    config, end = TRACED, Future()

    def __init__(self, full=False):
        self.registry, self.told, self.full = self, [], full

    def stream(self, prompt, adapter, sampling):
        for text in (prompt, f" by {adapter}, {sampling.max_tokens}"):
            yield SimpleNamespace(text=text)

    def load(self, name, folder, **fields):
        self.told.append(("load", name, folder, fields))
        if self.full:
            raise ValueError("there is no room for its rank")

    def unload(self, name):
        self.told.append(("unload", name))

    def generate(self, prompts, adapter, sampling):
        raise RequestFailed("its process is silent", retryable=adapter != "mine")


@contextlib.contextmanager
def answering(engine, arena=None, http=None, tenants=None):
    """Yield a call of the function's process: send one, and the answers until the last one."""
    ours, theirs = socket.socketpair()

    def call(fds=(), **fields):
        send_header(ours, {"id": 7, **fields})
        if fds:
            send_fds(ours, fds)
        answers = [receive_header(ours)]
        while "piece" in answers[-1]:
            answers.append(receive_header(ours))
        assert {answer.pop("id") for answer in answers} == {7}
        return answers if len(answers) > 1 else answers[0]

    with ours, theirs:
        thread = threading.Thread(target=Calls(theirs, engine, arena, "law", http, tenants).answer)
        thread.start()
        yield call
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert not thread.is_alive()


def test_a_function_says_what_memory_it_has_come_to_hold():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            calls = Calls(theirs, NoEngine(), None, "law", None, None)
            calls.say_memory()
            assert receive_header(ours)["private_bytes"] > 1 << 20
        calls.say_memory()  # its agent has gone


class Rehearsed(Outputs):
    """An engine that answers every prompt, and remembers it with its thread."""

    config = SimpleNamespace(otlp_traces_endpoint=None)
    tokenizer = SimpleNamespace(encode=lambda text: [5])
    model_info = SimpleNamespace(max_model_len=64)

    def __init__(self, fails=False):
        super().__init__()
        self.asked, self.fails = [], fails
        self.metrics = SimpleNamespace(requests_done=9, forget_requests=lambda: None)

    def remember_prefixes(self, wanted):
        pass

    def generate(self, prompts, adapter, sampling):
        self.asked.append((prompts, adapter, sampling[0].max_tokens, threading.current_thread()))
        if self.fails:
            raise ValueError("a task head answers no text")
        return []


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_without_a_call_rehearses_once_as_calls_are_answered(fails, monkeypatch):
    """Its agent hears nothing of it, and the calls that come run on a thread that has run."""
    routes, engine = [], Rehearsed(fails)
    monkeypatch.setattr(rehearsal, "QUIET_S", 0.01)
    http = SimpleNamespace(rehearse=lambda adapter, prompt: routes.append((adapter, prompt)) or 2)
    with answering(engine, http=http) as call:
        wait_until(lambda: len(engine.asked) == 2 * len(rehearsal.prompts_of(engine)))
        for _ in range(2):
            call(call="generate", prompts=["said"], sampling=[{"max_tokens": 3}])
            time.sleep(0.03)
    prompts = [one[0][0] for one in engine.asked]
    assert prompts == [*rehearsal.prompts_of(engine) * 2, "said", "said"]
    assert {one[1] for one in engine.asked} == {"law"}
    assert len({one[3] for one in engine.asked}) == 1
    assert routes == [("law", "a")] * 2


def test_a_rehearsal_begins_once(monkeypatch):
    rehearsed, began = [], threading.Event()
    monkeypatch.setattr(rehearsal, "QUIET_S", 0.01)
    monkeypatch.setattr(
        rehearsal, "rehearse", lambda *given: rehearsed.append(given) or began.set()
    )
    with answering(Outputs()) as call:
        assert began.wait(60)
        for _ in range(2):
            call(call="stream", prompts=["said"], sampling=[{"max_tokens": 3}])
            time.sleep(0.03)
    assert len(rehearsed) == 1


def test_a_function_whose_first_call_comes_at_once_rehearses_never(monkeypatch):
    rehearsed = []
    monkeypatch.setattr(rehearsal, "QUIET_S", 60)
    monkeypatch.setattr(rehearsal, "rehearse", lambda *given: rehearsed.append(given))
    http = SimpleNamespace(metrics_text=lambda: "up 1")
    with answering(Outputs(), http=http) as call:
        call(call="metrics")  # no caller's
        call(call="stream", prompts=["said"], sampling=[{"max_tokens": 3}])
        monkeypatch.setattr(rehearsal, "QUIET_S", 0.01)
        for _ in range(2):
            call(call="metrics")
            time.sleep(0.03)
    assert not rehearsed


def test_a_rehearsal_sees_the_call_that_waits(monkeypatch):
    seen, begun = [], threading.Event()

    def rehearse(engine, ask, http, asked):
        seen.append(asked())
        begun.set()
        wait_until(asked)
        seen.append(asked())

    monkeypatch.setattr(rehearsal, "QUIET_S", 0.01)
    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    with answering(Outputs()) as call:
        assert begun.wait(60)
        assert call(call="stream", prompts=["said"], sampling=[{"max_tokens": 3}])[0] == {
            "piece": "said"
        }
    assert seen == [False, True]


def test_pieces_come_as_they_are_made_and_the_end_behind_them():
    with answering(Outputs()) as call:
        told = call(call="stream", prompts=["said"], sampling=[{"max_tokens": 3}])
    assert told == [{"piece": "said"}, {"piece": " by law, 3"}, {"value": None}]


def test_what_a_function_says_of_itself():
    arena = SimpleNamespace(changed=lambda: ["embed"])
    with answering(Outputs(), arena, SimpleNamespace(metrics_text=lambda: "up 1")) as call:
        assert call(call="changed") == {"value": ["embed"]}
        assert call(call="metrics") == {"value": "up 1"}
        assert set(call(call="memory")["value"]) == {"Size", "Pss"}
    read, write = os.pipe()
    with answering(Outputs()) as call:  # one that answers no HTTP
        assert call(call="metrics") == {"value": ""}
        assert call(call="http", fds=[write]) == {"value": None}
    os.close(write)
    assert os.read(read, 1) == b""  # the connection was closed at once
    os.close(read)


def test_an_adapter_of_the_engine_itself_is_loaded_and_let_go():
    engine = Outputs()
    with answering(engine) as call:
        assert call(call="load", name="sql", folder="/adapters/sql") == {"value": None}
        assert call(call="leave", name="sql", epoch=1) == {"value": None}
    pinned = {"replace": True, "pinned": True, "confined": False}
    assert engine.told == [("load", "sql", "/adapters/sql", pinned), ("unload", "sql")]


class Seats:
    """Seats of tenants: one that is full, and which process was lost."""

    def __init__(self):
        self.sat, self.left = [], []

    def seat_of(self, name, digest):
        if name == "third":
            raise SeatsTaken("All 2 seats of this backbone are taken.")

    def sit(self, name, report, seat):
        self.sat.append((name, seat.epoch))
        close_all([seat.channel, seat.bell, seat.life])

    def leave(self, name, epoch):
        self.left.append((name, epoch))
        return epoch == 2  # an older process's news come late

    def lost_epoch(self, name):
        return {"sql": 4}.get(name)


def test_a_tenant_sits_where_there_is_a_seat_and_leaves_only_its_own(monkeypatch):
    monkeypatch.setattr(function_calls, "report_of", lambda r: SimpleNamespace(digest=r["digest"]))
    monkeypatch.setattr(function_calls, "digest_of", lambda name, digest: f"{name}/{digest}")
    engine, seats = Outputs(), Seats()
    read, write = os.pipe()
    report = {"digest": "d"}
    with answering(engine, tenants=seats) as call:
        sit = {"call": "sit", "report": report, "epoch": 2}
        assert call([write] * 3, name="sql", **sit) == {"value": None}
        refused = call([write] * 3, name="third", **sit)
        assert (refused["busy"], "All 2 seats" in refused["text"]) == (True, True)
        engine.full = True
        assert "no room for its rank" in call([write] * 3, name="big", **sit)["text"]
        call(call="leave", name="sql", epoch=1)
        call(call="leave", name="sql", epoch=2)
    os.close(write)
    assert os.read(read, 1) == b""  # no descriptor of a refused one is left open
    os.close(read)
    assert seats.sat == [("sql", 2), ("big", 2)]
    assert seats.left == [("big", 2), ("sql", 1), ("sql", 2)]
    assert [told for told in engine.told if told[0] == "unload"] == [("unload", "sql")]
    assert engine.told[0][3]["digest"] == "sql/d"


def test_an_adapters_process_that_is_lost_is_told_of_without_a_call():
    ours, theirs = socket.socketpair()
    seats = Seats()
    with ours:
        with theirs:
            Calls(theirs, NoEngine(), None, None, None, seats)
            seats.on_lost("sql", 4)
            assert receive_header(ours) == {"lost": "sql", "epoch": 4}
        seats.on_lost("sql", 4)  # its agent has gone


def test_a_failure_for_want_of_an_adapter_s_process_names_it():
    ask = {"call": "generate", "prompts": ["a"], "sampling": [{}]}
    with answering(Outputs(), tenants=Seats()) as call:
        lost = call(adapter="sql", **ask)
        assert (lost["error"], lost["tenant"], lost["epoch"]) == ("FunctionDied", "sql", 4)
        for adapter, retryable in (("law", True), ("mine", False)):
            other = call(adapter=adapter, **ask)
            assert (other["error"], other["retryable"]) == ("RequestFailed", retryable)
            assert "tenant" not in other
