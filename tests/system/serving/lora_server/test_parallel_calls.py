"""Calls of which several are under way on one connection."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.lora_server.parallel_calls import ParallelCaller, answer_in_parallel


def test_a_short_call_passes_a_long_one_and_each_gets_its_own_answer(pipe):
    go = threading.Event()

    def long(x):
        assert go.wait(60)
        return x

    thread = answer_in_parallel(pipe[1], {"long": long, "short": lambda x: 2 * x})
    caller = ParallelCaller(pipe[0])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(caller.call, "long", "late")
        assert [caller.call("short", x) for x in range(5)] == [0, 2, 4, 6, 8]
        assert not waits.done()
        go.set()
        assert waits.result(60) == "late"
    caller.close()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ConnectionError, match="has gone"):
        caller.call("short", 1)
    caller.close()  # once more changes nothing


def test_errors_keep_their_kind_and_harm_no_other_call(pipe):
    def fail(kind):
        raise {"value": ValueError, "gone": ConnectionResetError, "other": KeyError}[kind](kind)

    answer_in_parallel(pipe[1], {"fail": fail, "fine": lambda: 1})
    caller = ParallelCaller(pipe[0])
    kinds = {"value": ValueError, "gone": ConnectionError, "other": RuntimeError}
    for kind, error in kinds.items():
        with pytest.raises(error, match=kind):
            caller.call("fail", kind)
    with pytest.raises(ValueError, match="no call 'system'"):
        caller.call("system")
    assert caller.call("fine") == 1
    caller.close()


def test_calls_under_way_end_with_the_other_side(pipe):
    caller = ParallelCaller(pipe[0])
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(caller.call, "nobody") for _ in range(2)]
        pipe[1].recv_bytes(), pipe[1].recv_bytes()
        pipe[1].close()
        for one in waits:
            with pytest.raises(ConnectionError, match="has gone"):
                one.result(60)


def test_calls_that_hang_are_given_up_and_delay_no_other(pipe):
    """However many hang; what they answer in the end is nobody's answer."""
    go, ended = threading.Event(), threading.Semaphore(0)

    def hang():
        assert go.wait(60)
        ended.release()
        return "late"

    answer_in_parallel(pipe[1], {"hang": hang, "fine": lambda x: x})
    caller = ParallelCaller(pipe[0], limit_s=0.02)
    for _ in range(6):
        with pytest.raises(TimeoutError, match=r"no answer to hang within 0\.02 s"):
            caller.call("hang")
    caller.limit_s = 60.0
    assert caller.call("fine", 1) == 1
    go.set()
    for x in range(6):
        assert ended.acquire(timeout=60)
        assert caller.call("fine", x) == x
    caller.close()


@pytest.mark.parametrize("said", [b"\x80\x04not json", b"7"])
def test_bytes_that_are_no_answer_are_the_end(pipe, said):
    caller = ParallelCaller(pipe[0])
    pipe[1].send_bytes(said)
    with pytest.raises(ConnectionError):
        caller.call("hello")
