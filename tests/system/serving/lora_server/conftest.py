"""Both ends of a connection, for calls between the processes of a LoRA Server."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    """A connection's two ends, closed after the test."""
    here, there = multiprocessing.Pipe()
    yield here, there
    here.close()
    there.close()
