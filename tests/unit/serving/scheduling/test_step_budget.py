import pytest

from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.step_budget import StepBudget


def make(num_prompt: int, *, computed: int = 0, outputs: int = 0, **sampling) -> Sequence:
    sampling = {"max_tokens": 4, **sampling}
    request = Request(
        request_id="r",
        prompt_ids=tuple(range(num_prompt)),
        sampling=Sampling(**sampling),
        adapter=None,
        adapter_digest="",
        on_output=lambda delta: None,
        arrival_s=0.0,
        deadline_s=0.0,
    )
    return Sequence(
        request=request,
        index=0,
        seed=0,
        token_ids=list(range(num_prompt + outputs)),
        num_computed=computed,
        num_scheduled_outputs=outputs,
        max_outputs=sampling["max_tokens"],
    )


def shapes(step: StepBudget) -> list[tuple[int, int, bool, bool]]:
    plan = step.plan()
    chunks = plan.chunks if plan else ()
    return [(c.start, c.num_tokens, c.samples, c.prompt_logprobs) for c in chunks]


@pytest.mark.parametrize(
    ("tokens", "logit_rows", "sequence", "chunk"),
    [
        (8, 8, make(5), (0, 5, True, False)),
        (4, 8, make(5), (0, 4, False, False)),
        (8, 8, make(5, computed=4), (4, 1, True, False)),
        (8, 8, make(5, computed=5, outputs=1), (5, 1, True, False)),
        (8, 8, make(5, computed=0, outputs=2), (0, 7, True, False)),
        (8, 8, make(5, max_tokens=0, echo=True), (0, 5, False, False)),
        (8, 3, make(5, prompt_logprobs=0), (0, 3, False, True)),
        (8, 5, make(5, prompt_logprobs=0), (0, 5, True, True)),
        (8, 8, make(5, computed=4, prompt_logprobs=0), (4, 1, True, False)),
    ],
)
def test_a_chunk_is_as_large_as_the_budgets_allow(tokens, logit_rows, sequence, chunk):
    step = StepBudget(tokens, logit_rows)
    step.schedule(sequence)
    assert shapes(step) == [chunk]
    assert step.sequences == [sequence]
    assert step.tokens == tokens - chunk[1]
    assert sequence.num_computed == chunk[0] + chunk[1]
    assert sequence.num_in_flight == 1


@pytest.mark.parametrize(
    ("tokens", "logit_rows", "sequence"),
    [
        (0, 8, make(5)),
        (8, 0, make(5)),
        (8, 0, make(5, prompt_logprobs=0)),
        (8, 8, make(5, computed=8, outputs=4)),
    ],
)
def test_nothing_is_planned_without_budget_or_need(tokens, logit_rows, sequence):
    step = StepBudget(tokens, logit_rows)
    step.schedule(sequence)
    assert step.plan() is None
    assert sequence.num_in_flight == 0


def test_scores_known_before_a_preemption_cost_no_logit_row_again():
    sequence = make(8, prompt_logprobs=0)
    sequence.num_prompt_logprobs = 5
    step = StepBudget(16, 4)
    step.schedule(sequence)
    assert shapes(step) == [(0, 5, False, False)]
    assert step.logit_rows == 4
    second = StepBudget(16, 4)
    second.schedule(sequence)
    assert shapes(second) == [(5, 3, True, True)]
    assert second.logit_rows == 1  # positions 5 and 6 are scored, position 7 is sampled


def test_admitted_sequences_are_named_in_the_plan():
    step = StepBudget(4, 4)
    first, second = make(2), make(5)
    step.admit(first)
    step.schedule(second)
    plan = step.plan()
    assert plan.admitted == (first,)
    assert plan.num_tokens == 4
    assert step.exhausted
