"""Contradictions between the scheduler's queues and the states of its sequences. No jax."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from serving.api.request import Sequence, SequenceState
from serving.scheduling.running_line import RunningLine
from serving.scheduling.waiting_line import WaitingLine


def check_queues(
    running: RunningLine,
    waiting: WaitingLine,
    requests: Mapping[str, SequenceOf[Sequence]],
) -> None:
    """Raise AssertionError when a queue is out of order, or holds what it should not."""
    waiting.check_integrity()
    running.check_integrity()
    queued = sorted(sequence.number for sequence in (*waiting, *running))
    listed = sorted(sequence.number for queue in requests.values() for sequence in queue)
    assert queued == listed, "requests and queues disagree"
    for sequence in waiting:
        assert sequence.state is SequenceState.WAITING, sequence.state
        assert sequence.row < 0, "waiting with a row"
        assert not sequence.pages, "waiting with pages"
    for sequence in running:
        assert sequence.state is SequenceState.RUNNING, sequence.state
