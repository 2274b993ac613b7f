"""A program on a CPU waits for values that the host posts after its dispatch."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doubles.host_board import patience

from lora_jax.ops.cpu import build
from lora_jax.ops.cpu.host_board import HostBoard

COUNT = 1003


@pytest.fixture
def board():
    build.require()
    return HostBoard(COUNT)


@jax.jit
def work(x):
    return jnp.tanh(x @ x) @ x


@pytest.fixture
def read(board):
    """Return a function that sends a program, which reads a board after some work."""
    call = jax.jit(lambda address, number, x: board.read(address, number, work(x)) + 0)
    x = jnp.ones((256, 256))

    def send(number, board=board):
        return call(board.address, np.array([number], np.int32), x)

    np.testing.assert_array_equal(send(0), np.full(COUNT, -1))
    return send


def test_values_come_when_they_are_posted(board, read):
    for number in (1, 2, 2**31 - 1, 3):
        sent = read(number)
        time.sleep(0.01)
        board.values[:] = number - np.arange(COUNT)
        assert not sent.is_ready()
        board.post(number)
        np.testing.assert_array_equal(sent, number - np.arange(COUNT))
        assert not board.was_late(number)
    board.values[:] = 5
    np.testing.assert_array_equal(read(3), np.full(COUNT, 5))  # posted before: no wait


def test_values_that_do_not_come_are_given_up_and_said(board, read):
    with patience(0.05):
        began = time.monotonic()
        np.testing.assert_array_equal(read(9), np.full(COUNT, -1))
        assert time.monotonic() - began >= 0.05
    assert [board.was_late(number) for number in (9, 2, 10)] == [True, False, False]
    sent = read(10)
    board.post(8)  # wakes it for nothing
    time.sleep(0.02)
    assert not sent.is_ready()
    board.end()  # nobody waits any more
    sent.block_until_ready()
    read(11).block_until_ready()
    assert not board.was_late(10)


def test_a_program_that_waits_keeps_neither_python_nor_a_core_nor_other_programs(board, read):
    work(x := jnp.ones((256, 256))).block_until_ready()
    sent = read(1)
    time.sleep(0.05)
    began = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - began < 0.1
    with ThreadPoolExecutor(1) as pool:  # of one thread, programs run in turn
        pool.submit(lambda: work(x).block_until_ready()).result(10)
    assert not sent.is_ready()
    board.post(1)
    sent.block_until_ready()


def test_a_call_refuses_what_is_no_address_or_number(board):
    values = jax.ShapeDtypeStruct((COUNT,), np.int32)
    call = jax.ffi.ffi_call("lora_jax_read_board", values)
    one = np.zeros(1, np.int32)
    for given in ((np.zeros(3, np.uint32), one), (board.address, np.zeros(2, np.int32))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="two words and one number"):
            jax.block_until_ready(call(*given, one))


def test_without_kernels_there_is_no_board(monkeypatch):
    monkeypatch.setattr(build, "available", lambda: False)
    with pytest.raises(NotImplementedError, match="could not be built"):
        HostBoard(3)
