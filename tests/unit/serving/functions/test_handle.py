"""A function's handle against processes that answer, die, or never start; all of them threads."""

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.waiting import wait_until

from lora_jax.memory.wire import receive_header, send_header
from serving.api.outputs import RequestFailed
from serving.api.sampling import Sampling
from serving.functions.handle import Function, FunctionDied, FunctionRefused
from serving.functions.running import Running

PIDS = itertools.count(1)


def process(behave) -> Running:
    """Return a process of `behave(connection)`, which ends its side when it returns."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            behave(theirs)

    threading.Thread(target=run, daemon=True).start()
    return Running(ours, next(PIDS), {})


def answering(connection: socket.socket) -> None:
    """Answer calls until the other side has gone; a call of `changed` ends the process."""
    while True:
        try:
            call = receive_header(connection)
        except OSError:
            return
        number = {"id": call["id"]}
        if call["call"] == "changed":
            return
        if call["call"] == "stream":
            for piece in call["prompts"][0].split():
                send_header(connection, number | {"piece": piece})
        failed = {"error": "RequestFailed", "text": "no room", "retryable": True}
        bad = {"error": "ValueError", "text": "too long", "retryable": False}
        answers = {"fail": failed, "bad": bad}
        prompt = call.get("prompts", [""])[0]
        send_header(connection, number | answers.get(prompt, {"value": []}))


def test_calls_get_their_own_answers():
    with Function("f", lambda: process(answering)) as function:
        assert list(function.stream("a b c")) == ["a", "b", "c"]
        assert function.generate(["x"]) == []
        with pytest.raises(ValueError, match="too long"):
            function.generate(["bad"])
        with pytest.raises(RequestFailed, match="no room") as failed:
            function.generate("fail")
        assert failed.value.retryable
    with pytest.raises(ConnectionError, match="'f' is closed"):
        function.generate("x")
    function.close()


def test_prompts_and_samplings_are_sent_as_an_engine_takes_them():
    """No sampling is the model's default, which the function's process knows."""
    sent = []

    def note(connection: socket.socket) -> None:
        while True:
            try:
                call = receive_header(connection)
            except OSError:
                return
            sent.append((call["prompts"], call["sampling"]))
            send_header(connection, {"id": call["id"], "value": []})

    two = Sampling(max_tokens=2)
    both = {"prompt": "a", "prompt_token_ids": [1]}
    with Function("f", lambda: process(note)) as function:
        function.generate("a")
        function.generate(np.array([1, 2]), two)
        function.generate(["a", np.array([[3]])[0], {"prompt": "b"}, both], [two] * 4)
        list(function.stream((1, 2)))
        list(function.stream("a", two))
        for prompts, sampling, words in (
            (None, None, "prompts must be a text, token ids, .* got NoneType"),
            (5, None, "prompts must be .* got int"),
            (b"abc", None, "prompts must be .* got bytes"),
            ([b"abc"], None, "got bytes: decode them"),
            ([[1, "a"]], None, "got str where a token id should be"),
            ("a", {"max_tokens": 3}, "sampling must be Sampling or a list of them, got dict"),
            ("a", [3], "sampling must hold Sampling, got int"),
        ):
            with pytest.raises(TypeError, match=words):
                function.generate(prompts, sampling)
        with pytest.raises(TypeError, match="got str where a token id"):
            function.stream(["a"])
        with pytest.raises(TypeError, match="sampling must be Sampling or None"):
            function.stream("a", 3)
        with pytest.raises(ValueError, match="'f' takes no images"):
            function.generate({"prompt": "a", "multi_modal_data": {"image": "x.png"}})
        with pytest.raises(ValueError, match="1 prompts but 2 values of sampling"):
            function.generate("a", [two] * 2)
    set_two = {"max_tokens": 2}
    assert sent == [
        (["a"], [None]),
        ([[1, 2]], [set_two]),
        (["a", [3], "b", both], [set_two] * 4),
        ([[1, 2]], [None]),
        (["a"], [set_two]),
    ]


def test_a_process_that_dies_is_replaced_and_says_so_to_its_calls():
    with Function("f", lambda: process(answering)) as function:
        first = function.pid
        with pytest.raises(FunctionDied, match="ended during the call"):
            function.changed()
        assert function.generate("x") == []
        assert function.pid > first


def test_a_function_that_always_dies_is_given_up_with_its_reason():
    """Each process ends at its first call; an answer in between would begin the count anew."""
    starts = []

    def start() -> Running:
        starts.append(1)
        if len(starts) > 1:
            raise ConnectionError("no memory")
        return process(answering)

    function = Function("f", start)
    with pytest.raises(FunctionDied):
        function.changed()
    with pytest.raises(ConnectionError, match=r"does not start: no memory \(4 times"):
        function.generate("x")
    assert len(starts) == 4


@pytest.mark.parametrize("answered", ["x", "bad"])
def test_answers_between_deaths_begin_the_count_anew(answered):
    """A refused call is an answer, too: the process is well."""
    with Function("f", lambda: process(answering)) as function:
        for _ in range(6):
            with pytest.raises(FunctionDied):
                function.changed()
            try:
                function.generate(answered)
            except ValueError:
                assert answered == "bad"
        assert function.state == "running"


def test_a_process_that_ended_with_others_is_no_death_of_its_own():
    """As an adapter's whose engine another adapter has ended."""
    ended = []

    class Shared(Running):
        @property
        def ended_by_others(self):
            ended.append(1)
            return True

    def start() -> Running:
        made = process(answering)
        made.__class__ = Shared
        return made

    with Function("f", start) as function:
        for count in range(6):
            with pytest.raises(FunctionDied):
                function.changed()
            wait_until(lambda count=count: len(ended) > count)
        function.warm()
        assert function.state == "running"


def test_a_process_that_gets_ready_after_the_end_of_its_function_is_ended():
    begun, go, made = threading.Event(), threading.Event(), []

    def start() -> Running:
        begun.set()
        go.wait(60)
        made.append(process(answering))
        return made[0]

    function = Function("f", start, lazy=True)
    thread = threading.Thread(target=function.begin)
    thread.start()
    assert begun.wait(60)
    function.close()
    go.set()
    thread.join(60)
    wait_until(lambda: made[0].ended)


def test_a_start_that_fails_in_an_unknown_way_is_told_to_all_that_wait():
    def start() -> Running:
        raise RuntimeError("can't start new thread")

    function = Function("f", start, lazy=True)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(function.warm) for _ in range(2)]
        for one in waiting:
            with pytest.raises(ConnectionError, match="RuntimeError: can't start new thread"):
                one.result(10)
    assert function.state == "failed"
    function.close()


def test_a_function_that_is_closed_while_it_starts_is_not_given_up(caplog):
    """The log of an end in order names no error."""
    begun, go = threading.Event(), threading.Event()

    def start() -> Running:
        begun.set()
        assert go.wait(60)
        raise ConnectionError("the agent is closed")

    function = Function("f", start, lazy=True)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(function.warm)
        assert begun.wait(60)
        function.close()
        go.set()
        with pytest.raises(ConnectionError, match="'f' is closed"):
            waiting.result(60)
    wait_until(lambda: not [t for t in threading.enumerate() if "_restart" in t.name])
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_first_start_that_fails_is_its_caller_s():
    def start() -> Running:
        raise ValueError("rank 99 is above the limit")

    with pytest.raises(ValueError, match="rank 99"):
        Function("f", start)


def test_an_offloaded_function_has_no_process_until_its_next_call():
    starts = []

    def start() -> Running:
        starts.append(process(answering))
        return starts[-1]

    with Function("f", start) as function:
        created = function.arrivals.last
        first = function.pid
        assert function.offload()
        assert function.is_offloaded
        assert function.offload()
        assert starts[0].ended
        assert function.generate("x") == []
        assert not function.is_offloaded
        assert function.pid > first
        assert function.offload()
        function.warm()
        assert len(starts) == 3
        assert created < function.arrivals.last <= time.monotonic()
        assert function.arrivals.rate() == 0.0  # of one call
    assert not function.offload()


def test_a_function_with_calls_under_way_is_not_offloaded():
    heard, go = threading.Event(), threading.Event()

    def slow(connection: socket.socket) -> None:
        call = receive_header(connection)
        heard.set()
        go.wait(60)
        send_header(connection, {"id": call["id"], "value": []})
        connection.recv(1)

    with Function("f", lambda: process(slow)) as function:
        answers = []
        caller = threading.Thread(target=lambda: answers.append(function.generate("x")))
        caller.start()
        assert heard.wait(60)
        assert not function.offload()
        go.set()
        caller.join(60)
        assert answers == [[]]


@pytest.mark.parametrize("error", [ValueError, ConnectionError, RuntimeError])
def test_who_waits_for_a_first_start_that_fails_gets_its_reason_and_starts_nothing(error):
    reached, go, starts = threading.Event(), threading.Event(), []

    def start() -> Running:
        starts.append(1)
        reached.set()
        assert go.wait(60)
        raise error("rank 99")

    function = Function("f", start, lazy=True)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(function.begin)
        assert reached.wait(60)
        waiting = pool.submit(function.warm)
        go.set()
        with pytest.raises(error, match="rank 99"):
            first.result(60)
        function.close()
        with pytest.raises(ConnectionError, match="rank 99") as said:
            waiting.result(60)
    assert isinstance(said.value, FunctionRefused) is (error is ValueError)
    assert (starts, function.state) == ([1], "closed")
