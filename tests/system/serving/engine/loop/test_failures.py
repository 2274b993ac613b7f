"""Sequences that end for what a step gave, and the errors that their callers read."""

import dataclasses
from types import SimpleNamespace

from serving.api.request import (
    Request,
    ScheduledChunk,
    Sequence,
    SequenceResult,
    SequenceState,
    StepPlan,
)
from serving.api.sampling import Sampling
from serving.engine.loop import failures
from serving.steps.sampling.sampler import INVALID_TOKEN, NO_TOKEN


def sequence(*, bound=False, state=SequenceState.RUNNING, discarded=0, adapter=None, **fields):
    request = Request("r", (7, 8), Sampling(**fields), adapter, "", print, 0.0, 0.0)
    request = dataclasses.replace(request, grammar=object() if bound else None)
    return Sequence(request, 0, 0, [7, 8], state=state, num_discarded=discarded)


def test_late_masks_end_the_rows_that_drew_without_theirs_and_no_other(caplog):
    waiting = SequenceState.WAITING  # preempted, with a token on its way
    lost = [sequence(bound=True), sequence(bound=True, state=waiting)]
    kept = [
        sequence(),
        sequence(bound=True, state=SequenceState.FINISHED),
        sequence(bound=True, discarded=1),
    ]
    chunks = [ScheduledChunk(one, 1, 1, True) for one in (*lost, *kept)]
    chunks.append(ScheduledChunk(sequence(bound=True), 0, 1, False))  # draws nothing yet
    found = failures.of_late_masks(StepPlan(tuple(chunks)))
    assert [one.sequence for one in found] == lost
    assert all(one.retryable and "masks came more than 20 s late" in one.why for one in found)
    assert "2 sequences end" in caplog.text


def test_bad_logits_end_their_rows_but_void_results():
    rows = [sequence(), sequence(bad_words=["x"]), sequence(discarded=1), sequence()]
    tokens = [NO_TOKEN, INVALID_TOKEN, INVALID_TOKEN, 5]
    results = [
        SequenceResult(ScheduledChunk(one, 1, 1, True), token)
        for one, token in zip(rows, tokens, strict=True)
    ]
    found = failures.of_bad_logits(results)
    why = "The model's logits are not finite numbers."
    assert found == [failures.Failure(one, why) for one in rows[:2]]


def test_barred_tokens_are_the_fault_of_the_request_which_reads_the_fields():
    barred = sequence(allowed_token_ids=[3], bad_words=["x"], min_tokens=3, max_tokens=9)
    barred.token_ids += [3, 3]
    (found,) = failures.of_bad_logits(
        [SequenceResult(ScheduledChunk(barred, 3, 1, True), NO_TOKEN)]
    )
    assert (found.sequence, found.retryable, found.bad_request) == (barred, False, True)
    assert found.why.startswith("allowed_token_ids and bad_words and min_tokens: no token is left")
    assert "after 2 tokens of the answer" in found.why


def test_a_lost_server_is_named_by_the_adapter():
    scheduler = SimpleNamespace(fail_adapters=lambda digests: [sequence(adapter="sql")])
    residencies = SimpleNamespace(servable_here=lambda digests: frozenset())
    (found,) = failures.of_lost_server(scheduler, residencies, frozenset(["digest"]))
    assert found.retryable
    assert "'sql'" in found.why
