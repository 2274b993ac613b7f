"""Every contradiction is found."""

import pytest

from serving.api.request import Request, Sequence, SequenceState
from serving.api.sampling import Sampling
from serving.scheduling.integrity import check_queues
from serving.scheduling.running_line import RunningLine
from serving.scheduling.waiting_line import WaitingLine


def make(number: int, state: SequenceState, **fields) -> Sequence:
    request = Request("r", (1,), Sampling(), None, "", lambda delta: None, 0.0, 0.0)
    return Sequence(request, 0, 0, [1], state=state, number=number, **fields)


def queues(**changes) -> tuple[RunningLine, WaitingLine, dict[str, list[Sequence]]]:
    running = RunningLine(4)
    for number in (0, 1):
        running.add(make(number, SequenceState.RUNNING))
    waiting, last = WaitingLine(), make(2, SequenceState.WAITING)
    waiting.add(last)
    for name, value in changes.items():
        setattr(last, name, value)
    return running, waiting, {"r": [*running, last]}


def test_what_agrees_passes():
    running, waiting, requests = queues()
    check_queues(running, waiting, requests)


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"row": 3}, "row"), ({"pages": [1]}, "pages"), ({"state": SequenceState.RUNNING}, "RUNNING")],
)
def test_a_waiting_sequence_holds_nothing(change, problem):
    with pytest.raises(AssertionError, match=problem):
        check_queues(*queues(**change))


def test_order_and_completeness_are_checked():
    running, waiting, requests = queues()
    first = next(iter(running))
    first.number = 9
    with pytest.raises(AssertionError, match="order"):
        check_queues(running, waiting, requests)
    first.number = 0
    requests["r"].pop()
    with pytest.raises(AssertionError, match="disagree"):
        check_queues(running, waiting, requests)
