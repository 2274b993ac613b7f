"""Books that every end of processes with whole adapters keeps: requests, slots and numbers."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from serving.lora_server.client import LOCAL
from serving.lora_server.whole_side import LOST, AbstractWholeSide, numbers_at


class Side(AbstractWholeSide):
    """An end with the adapters that a test says."""

    def __init__(self):
        super().__init__(num_slots=3)
        self.here, self.left, self.freed = {"a": 4, "b": 9}, set(), []

    def lost_epoch(self, name):
        return None if name in self.here else 1

    def is_ready(self, digest):
        return digest in self.here

    def affected_by(self, status):
        return frozenset()

    def close(self):
        pass

    def _report(self, name):
        return SimpleNamespace(digest=name) if name in self.here else None

    def _number_of(self, digest):
        return self.here[digest]

    def _free(self):
        with self._lock:
            gone = self.left - self._in_use()
        self.left -= gone
        self.freed += sorted(gone)

    @property
    def _given_numbers(self):
        return list(self.here.values())

    @property
    def _any_leaving(self):
        return bool(self.left)


def entry(digest):
    return SimpleNamespace(digest=digest)


def test_rows_have_a_number_where_their_adapter_has_the_site():
    bits = 8
    numbers = jnp.asarray([3 | 0b01 << bits, 7 | 0b10 << bits, 5 | 0b11 << bits, LOCAL])
    assert numbers_at(0, numbers, bits).tolist() == [3, LOCAL, 5, LOCAL]
    assert numbers_at(1, numbers, bits).tolist() == [LOCAL, 7, 5, LOCAL]


def test_what_has_left_is_let_go_when_no_request_and_no_step_needs_it():
    side = Side()
    for _ in range(2):
        side.retain(entry("a"))
    side.left = {"a", "b"}
    side.collect(0)
    assert (side.freed, side.is_busy) == (["b"], True)
    side.drop("a", 3)
    side.drop("a", 5)
    side.drop("a", 9)  # of no request that is known
    side.collect(4)
    assert side.freed == ["b"]
    side.collect(5)
    assert (side.freed, side.is_busy) == (["b", "a"], False)
    side.check_integrity()


def test_requests_of_an_adapter_that_is_not_there_end():
    side = Side()
    side.retain(entry("a"))
    assert (side.take_failures(), side.is_lost, side.is_busy) == ([], False, False)
    del side.here["a"]
    assert (side.take_failures(), side.is_lost, side.is_busy) == ([("a", LOST)], True, True)
    with pytest.raises(AssertionError, match="kept for nobody"):
        side.check_integrity()


def test_the_table_of_slots_is_taken_once_for_each_change():
    side = Side()
    side.bind(1, "a")
    numbers, version = side.take_table()
    assert (numbers.tolist(), version) == ([LOCAL, 4, LOCAL], 0)
    side.bind(1, "a")
    assert side.take_table() is None
    side.bind(1, "b")
    assert side.take_table()[0].tolist() == [LOCAL, 9, LOCAL]


def test_an_adapter_is_known_by_its_report_alone():
    side = Side()
    weights = side.read("folder/a")
    assert (weights.sites, weights.digest) == ({}, "a")
    assert side.keep(weights) is weights
    with pytest.raises(FileNotFoundError, match="no process serves the adapter 'c'"):
        side.read("c")
    side.here["b"] = 4
    with pytest.raises(AssertionError, match="two adapters have one number"):
        side.check_integrity()
