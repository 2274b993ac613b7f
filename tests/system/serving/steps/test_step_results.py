"""Places of a chunk's results among a step's logit rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from serving.api.request import Request, ScheduledChunk, Sequence, StepPlan
from serving.api.sampling import Sampling
from serving.steps.step_results import HostArrays, InFlightStep, first_rows, num_targets


def chunk(row, start, count, samples, scores=False, prompt=6, drafts=()):
    ids = tuple(range(prompt))
    sampling = Sampling(logprobs=1)
    request = Request(str(row), ids, sampling, None, "", print, 0.0, 0.0)
    sequence = Sequence(request, 0, 0, list(ids), row=row)
    return ScheduledChunk(sequence, start, count, samples, scores, drafts=drafts)


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


@pytest.mark.parametrize(
    ("drawn", "given"),
    [
        ((4, 5, 6, 7), (4, 5, 6, 7)),
        ((4, 5, 9, 7), (4, 5, 9)),
        ((3, 5, 6, 7), (3,)),
        ((4, -1, 6, 7), (4,)),  # bad logits behind a right draft come alone in a next step
        ((-1, 5, 6, 7), (-1,)),
    ],
)
def test_drafts_yield_tokens_up_to_the_first_wrong_one(drawn, given):
    plan = StepPlan((chunk(1, 9, 4, True, drafts=(4, 5, 6)), chunk(0, 5, 1, True)))
    assert first_rows(plan) == (1, 0)
    token_ids = np.array([8, *drawn])
    places = np.arange(5.0)
    sampled = SimpleNamespace(
        token_ids=token_ids,
        logprobs=-places,
        ranks=places,
        top_ids=token_ids[:, None],
        top_logprobs=-places[:, None],
    )
    result = HostArrays(InFlightStep(plan, first_rows(plan), sampled, True)).result(
        plan.chunks[0], 1
    )
    results = (result, *result.more)
    assert tuple(one.token_id for one in results) == given
    assert [one.logprobs.logprob for one in results] == [-1.0, -2.0, -3.0, -4.0][: len(given)]
    assert not any(one.more for one in result.more)


def test_a_step_runs_until_its_tokens_are_there():
    class Tokens:
        is_there = False

        def is_ready(self):
            return self.is_there

    tokens = Tokens()
    step = InFlightStep(StepPlan(()), (), SimpleNamespace(token_ids=tokens), False)
    assert step.runs()
    tokens.is_there = True
    assert not step.runs()
