"""The process of all adapters: it loads and lets go by calls, and refuses what it does not take."""

import os
import socket
import threading

import jax
import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.wire import receive_header, send_header
from serving.functions import adapters_process

MODEL = ROOT / "assets" / "tiny-moe"
SIZES = {"max_rank": 16, "max_rows": 8, "dtype": "float32", "max_tenants": 2}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Return what sends it a call and returns the answer; it runs in a thread."""
    ours, theirs = socket.socketpair()
    address = str(tmp_path_factory.mktemp("adapters") / "socket")
    order = {"model": str(MODEL), "address": address, "gpu": 1, "device": "cpu", **SIZES}
    run = lambda: adapters_process.run(theirs, order, lambda: 7)  # noqa: E731
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready = receive_header(ours)
    assert (ready["ready"], ready["private_bytes"]) == (True, 7)

    def call(what, **given):
        send_header(ours, {"id": 3, "call": what, **given})
        answer = receive_header(ours)
        assert answer.pop("id") == 3
        return answer

    with ours, theirs:
        yield call
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert not thread.is_alive()


def load(process, name, number):
    return process("load", number=number, name=name, folder=str(MODEL / "adapters" / name))


def test_it_holds_adapters_under_numbers_and_lets_them_go(process):
    report = load(process, "law", 0)["value"]
    assert (report["kind"], "q_proj" in report["modules"]) == ("lora", True)
    assert "place of adapter number 2 is taken" in load(process, "summary", 2)["text"]
    assert process("unload", number=0) == {"value": None}
    assert "value" in load(process, "summary", 2)
    assert process("unload", number=2) == {"value": None}


def test_what_it_does_not_take_is_refused_by_name_and_it_goes_on(process):
    for folder, why in (("esft/token-law", "no plain LoRA adapter"), ("heads/intent", "task head")):
        given = {"number": 4, "name": "other", "folder": str(MODEL / folder)}
        text = process("load", **given)["text"]
        assert text.startswith("other ")
        assert why in text
        assert text.endswith("use isolation 'process'.")
    assert "error" in process("load", number=4, name="nothing", folder="/nowhere")
    assert process("sing")["error"] == "KeyError"
    assert "value" in load(process, "law", 4)
    assert process("unload", number=4) == {"value": None}


def test_a_start_that_fails_tells_the_reason():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = {"model": "/nowhere", "device": "cpu", "address": "/nowhere/socket", **SIZES}
        adapters_process.run(theirs, order, lambda: 0)
        told = receive_header(ours)
        assert "process of all adapters cannot start" in told["error"]
        assert "retryable" not in told


def test_a_start_that_fails_for_its_device_may_be_tried_again(monkeypatch):
    def full(order):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(adapters_process, "Adapters", full)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        adapters_process.run(theirs, {"device": "cpu"}, lambda: 0)
        told = receive_header(ours)
    assert ("out of memory" in told["error"], told["retryable"]) == (True, True)


def test_on_a_gpu_it_takes_the_next_one_with_xlas_own_allocator(monkeypatch):
    taken = []
    monkeypatch.setattr(adapters_process, "use_gpu", taken.append)
    for given, kept in (("cuda_async", None), ("platform", "platform")):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", given)
        adapters_process._take_gpu(1)
        assert os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == kept
    assert taken == [1, 1]
