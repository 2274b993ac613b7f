"""Sequences that end with an error for what a step gave, and what their callers are told."""

import logging
from collections.abc import Iterable
from typing import NamedTuple

from serving.api.request import Sequence, SequenceResult, SequenceState, StepPlan
from serving.steps.sampler import INVALID_TOKEN

logger = logging.getLogger(__name__)

ADAPTER_WAIT = (
    "The adapter {name!r} found no free slot within adapter_wait_s: requests for other adapters "
    "held them. Raise max_loras, lora_memory_bytes or adapter_wait_s, or ask again."
)
ADAPTER_LOAD = "The adapter {name!r} could not be loaded: {why}"
_LATE_MASKS = "The answer's token masks came more than 20 s late, as after a pause; try again."
_SERVER_FAILED = "The LoRA Server did not answer for the adapter {name!r}; try again."
_NOT_FINITE = "The model's logits are not finite numbers."
_NONE_LEFT = (
    "No token may come next, or the model's logits are not finite numbers: allowed_token_ids and "
    "bad_words bar all tokens that min_tokens and structured_outputs leave."
)


class Failure(NamedTuple):
    """A sequence, and why it ended."""

    sequence: Sequence
    why: str
    retryable: bool = False


def of_late_masks(plan: StepPlan) -> list[Failure]:
    """Return the sequences whose tokens of this step should have been masked and were not."""
    bound = [
        chunk.sequence
        for chunk in plan.chunks
        if chunk.samples and chunk.sequence.request.grammar is not None
    ]
    live = [s for s in bound if s.state is not SequenceState.FINISHED and not s.num_discarded]
    logger.warning("Token masks came more than 20 s late: %d sequences end.", len(live))
    return [Failure(sequence, _LATE_MASKS, retryable=True) for sequence in live]


def of_lost_server(sequences: Iterable[Sequence]) -> list[Failure]:
    """Return the sequences as failures of their LoRA Server."""
    return [
        Failure(one, _SERVER_FAILED.format(name=one.request.adapter), retryable=True)
        for one in sequences
    ]


def of_bad_logits(results: Iterable[SequenceResult]) -> list[Failure]:
    """Return the sequences whose rows had no token to draw; void results have none."""
    bad = [one.chunk.sequence for one in results if one.token_id == INVALID_TOKEN]
    return [
        Failure(one, _NONE_LEFT if one.request.sampling.bars_tokens else _NOT_FINITE)
        for one in bad
        if not one.num_discarded
    ]
