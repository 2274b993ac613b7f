import pytest

from serving.api.request import QueueFull, Request, ScheduledChunk, Sequence, StepPlan
from serving.api.sampling import Sampling


def make(**fields) -> Sequence:
    request = Request(
        request_id="r",
        prompt_ids=(7, 8, 9),
        sampling=Sampling(),
        adapter=None,
        adapter_digest="",
        on_output=lambda delta: None,
        arrival_s=0.0,
        deadline_s=fields.pop("deadline_s", 0.0),
    )
    return Sequence(request=request, index=0, seed=0, token_ids=[7, 8, 9, 4], **fields)


def test_outputs_follow_the_prompt():
    assert (make().num_prompt, make().output_ids) == (3, [4])


@pytest.mark.parametrize(
    ("fields", "remaining"),
    [
        ({"max_outputs": 2}, 3),
        ({"max_outputs": 2, "num_computed": 3, "num_scheduled_outputs": 1}, 1),
        ({"max_outputs": 2, "num_computed": 4, "num_scheduled_outputs": 2}, 0),
        ({"max_outputs": 0, "num_computed": 1}, 2),
        ({"max_outputs": 0, "num_computed": 3}, 0),
    ],
)
def test_remaining_tokens_end_at_the_length_limit(fields, remaining):
    assert make(**fields).num_remaining == remaining


def test_order_is_deadline_then_arrival():
    late, early, same = make(deadline_s=2.0), make(deadline_s=1.0, number=5), make(deadline_s=1.0)
    assert sorted([late, early, same], key=lambda s: s.order) == [same, early, late]


def test_a_plan_counts_its_tokens():
    chunks = tuple(ScheduledChunk(make(), 0, count, False) for count in (3, 4))
    assert StepPlan(chunks).num_tokens == 7


def test_a_full_queue_names_its_limit_and_when_to_come_again():
    error = QueueFull("The queue is full: max_queue=5.", 2.0)
    assert str(error) == "The queue is full: max_queue=5. Try again after 2 s."
    assert error.retry_after_s == 2.0
