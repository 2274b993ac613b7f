"""Choices of a request: their own seeds and places, one bound of tokens."""

import pytest
from support.drivers.scheduler_driver import limits

from serving.api.request import Request
from serving.api.sampling import Sampling
from serving.scheduling.new_sequences import new_sequences


@pytest.mark.parametrize(("policy", "job"), [("fcfs", 0), ("sjf", 48)])
def test_choices_differ_in_seed_and_place_and_end_at_the_models_length(policy, job):
    sampling = Sampling(n=3, max_tokens=100)
    request = Request("r", (1, 2), sampling, None, "", lambda delta: None, 0.0, 0.0)
    made = new_sequences(request, limits(scheduling_policy=policy), seed=7, number=5)
    assert [s.number for s in made] == [5, 6, 7]
    assert len({s.seed for s in made}) == 3
    assert {s.max_outputs for s in made} == {46}
    assert {s.job_tokens for s in made} == {job}
    made[0].token_ids.append(9)
    assert made[1].token_ids == [1, 2], "they share one list"
