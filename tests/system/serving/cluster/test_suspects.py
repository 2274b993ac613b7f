"""A request with which instances end is tried twice, then refused, longer each time."""

import pytest

from serving.cluster import suspects
from serving.cluster.suspects import Suspects
from serving.http.errors import ApiError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_second_death_is_the_last_for_a_while():
    clock = Clock()
    made = Suspects(clock)
    made.check("/x", b"poison")
    made.died("/x", b"poison", "first")
    made.check("/x", b"poison")
    with pytest.raises(ApiError) as error:
        made.died("/x", b"poison", "second")
    assert (error.value.status, error.value.headers["Retry-After"]) == (503, "60")
    with pytest.raises(ApiError):
        made.check("/x", b"poison")
    made.check("/x", b"another")
    made.check("/y", b"poison")
    clock.now += 61
    made.check("/x", b"poison")
    with pytest.raises(ApiError) as error:
        made.died("/x", b"poison", "third")
    assert error.value.headers["Retry-After"] == "120"


def test_equal_requests_that_a_process_died_with_are_one_death():
    made = Suspects()
    for _ in range(3):
        made.died("/x", b"popular", ("instance", 0))
        made.check("/x", b"popular")
    for _ in range(3):
        with pytest.raises(ApiError) as error:
            made.died("/x", b"popular", ("instance", 1))
        assert error.value.headers["Retry-After"] == "60"


def test_an_answer_clears_a_request():
    made = Suspects()
    for number in range(5):
        made.died("/x", b"innocent", number)
        made.answered("/x", b"innocent")


def test_no_more_than_some_are_remembered(monkeypatch):
    monkeypatch.setattr(suspects, "_MOST", 3)
    made = Suspects()
    for number in range(10):
        made.died("/x", b"%d" % number, 0)
    assert len(made._deaths) == 3
