"""A program on a GPU waits for values that the host posts after its dispatch."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
COUNT = 100_003


def test_values_come_when_they_are_posted():
    from cuda_backend.host_board import HostBoard

    board = HostBoard(COUNT)
    read = jax.jit(lambda address, number, x: board.read(address, number, x @ x) + 0)
    address, x = jax.device_put(board.address), jnp.ones((1024, 1024))
    asked = [jax.device_put(np.array([number], np.int32)) for number in range(4)]
    assert (np.asarray(read(address, asked[0], x)) == -1).all()
    for number in range(1, 4):
        sent = read(address, asked[number], x)
        time.sleep(0.02)  # the device waits by now
        assert not sent.is_ready()
        board.values[:] = number * np.arange(COUNT)
        board.post(number)
        np.testing.assert_array_equal(sent, number * np.arange(COUNT))
        assert not board.was_late(number)


@pytest.mark.long
def test_values_that_do_not_come_are_given_up_and_said():
    from cuda_backend.host_board import HostBoard

    board = HostBoard(COUNT)
    read = jax.jit(lambda address, number: board.read(address, number, number) + 0)
    address, first, second = jax.device_put((board.address, *np.array([[9], [10]], np.int32)))
    began = time.monotonic()
    assert (np.asarray(read(address, first)) == -1).all()
    assert 19 < time.monotonic() - began < 40
    assert (board.was_late(9), board.was_late(10)) == (True, False)
    sent = read(address, second)
    board.end()  # nobody waits any more
    sent.block_until_ready()
    assert not board.was_late(10)
