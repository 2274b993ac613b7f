"""The memory of a board: one header for every device that reads it."""

import numpy as np

from lora_jax.ops.host_board import ANY, HEADER_BYTES, AbstractHostBoard


class Board(AbstractHostBoard):
    """A board in numpy's memory, which no program reads."""

    def __init__(self, count):
        self._share(np.zeros(HEADER_BYTES + 4 * count, np.uint8))

    def post(self, number):
        self._newest[0] = number

    def read(self, address, number, after):
        raise NotImplementedError


def test_the_header_has_the_newest_number_and_those_of_late_values():
    board = Board(3)
    board.values[:] = (7, 8, -9)
    board.post(5)
    low, high = map(int, board.address)
    words = board._newest.ctypes.data
    assert low | high << 32 == words
    assert board.values.ctypes.data - words == HEADER_BYTES
    assert not board.was_late(5)
    board._late[5 % 7] = 5  # as a program does
    assert [board.was_late(number) for number in (5, 12)] == [True, False]
    assert board._late.ctypes.data - words == 8
    board.end()
    assert int(board._newest[0]) == ANY == 2**64 - 1
    assert board.values.tolist() == [7, 8, -9]
