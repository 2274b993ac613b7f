"""Waiting sequences by tenant, in order of their deadlines."""

import dataclasses
import random

import pytest

from serving.api.request import Request, Sequence, Share
from serving.api.sampling import Sampling
from serving.scheduling.waiting_line import WaitingLine, order_of, prompts_by_tenant, take_out


def sequence(tenant: str, deadline_s: float, number: int) -> Sequence:
    share = Share(tenant)
    request = Request(
        "r", (1,), Sampling(), None, "", lambda delta: None, 0.0, deadline_s, share=share
    )
    return Sequence(request, 0, 0, [1], number=number)


def test_lines_are_sorted_and_go_when_empty():
    rng, line, held = random.Random(1), WaitingLine(), []
    for number in range(60):
        held.append(sequence(rng.choice("abc"), rng.random(), number))
        line.add(held[-1])
        if rng.random() < 0.4:
            line.remove(held.pop(rng.randrange(len(held))))
        line.check_integrity()
        assert len(line) == len(held)
    for tenant in "abc":
        mine = sorted((s for s in held if s.tenant == tenant), key=order_of)
        assert line.of(tenant) == mine
        assert line.count(tenant) == len(mine)
    assert set(line) == set(held)
    for one in held:
        line.remove(one)
    assert not line.tenants
    assert line.of("a") == []


def test_only_what_is_there_can_be_taken_out():
    one, other = sequence("a", 1.0, 1), sequence("a", 1.0, 2)
    with pytest.raises((AssertionError, IndexError)):
        take_out([one], other)


def test_prompts_that_run_come_before_those_that_wait():
    line, running = WaitingLine(), [sequence(t, 0.0, i) for i, t in enumerate("aab")]
    running[0].token_ids, running[0].num_computed = [1], 1  # nothing to compute
    for one in running[1:]:
        one.request = dataclasses.replace(one.request, prompt_ids=(1, 2, 3))
    waiting = [sequence(t, 0.0, 5 + i) for i, t in enumerate("ac")]
    for one in waiting:
        line.add(one)
    found = {tenant: list(of) for tenant, of in prompts_by_tenant(running, line).items()}
    assert found == {"a": [running[1], waiting[0]], "b": [running[2]], "c": [waiting[1]]}
    late = frozenset({waiting[0]})
    line.add(last := sequence("a", 1.0, 9))
    assert list(prompts_by_tenant(running, line, late)["a"]) == [running[1], last, waiting[0]]


def test_a_late_sequence_does_not_stand_behind_longer_jobs():
    line = WaitingLine()
    jobs = [sequence("a", 0.0, number) for number in range(4)]
    for one, tokens in zip(jobs, (8, 8, 8, 9), strict=True):
        one.job_tokens = tokens
        line.add(one)
    late = frozenset(jobs[:1])
    assert list(prompts_by_tenant([], line, late)["a"]) == [*jobs[1:3], jobs[0], jobs[3]]
