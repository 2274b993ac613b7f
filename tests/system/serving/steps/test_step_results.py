"""Where a chunk's results stand among a step's logit rows."""

from types import SimpleNamespace

import numpy as np

from serving.api.request import Request, ScheduledChunk, Sequence, StepPlan
from serving.api.sampling import Sampling
from serving.steps.step_results import HostArrays, InFlightStep, first_rows, num_targets


def chunk(row, start, count, samples, scores=False, prompt=6):
    ids = tuple(range(prompt))
    sampling = Sampling(logprobs=1)
    request = Request(str(row), ids, sampling, None, "", print, 0.0, 0.0)
    sequence = Sequence(request, 0, 0, list(ids), row=row)
    return ScheduledChunk(sequence, start, count, samples, scores)


def test_rows_follow_each_other_by_sequence_row():
    plan = StepPlan((chunk(3, 5, 1, True), chunk(0, 0, 4, False, True), chunk(1, 0, 6, True, True)))
    assert [num_targets(c) for c in plan.chunks] == [0, 4, 5]
    assert first_rows(plan) == (4 + 6, 0, 4)


def test_results_are_read_from_those_rows():
    plan = StepPlan((chunk(1, 5, 1, True), chunk(0, 0, 2, False)))
    sampled = SimpleNamespace(
        token_ids=[9], logprobs=[-0.5], ranks=[2], top_ids=[[4, 9]], top_logprobs=[[-0.4, -0.5]]
    )
    sampled = SimpleNamespace(**{name: np.asarray(value) for name, value in vars(sampled).items()})
    arrays = HostArrays(InFlightStep(plan, first_rows(plan), sampled, True))
    result = arrays.result(plan.chunks[0], 0)
    assert (result.token_id, result.logprobs.rank) == (9, 2)
    assert list(result.logprobs.top) == [4]
    assert arrays.result(plan.chunks[1], 0).token_id is None
