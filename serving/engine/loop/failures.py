"""Sequences that end with an error for what a step gave, and what their callers are told."""

import logging
from collections.abc import Iterable

from serving.api.request import Failure, Sequence, SequenceResult, SequenceState, StepPlan
from serving.api.sampling import Sampling
from serving.loading.residencies import Residencies
from serving.scheduling.scheduler import Scheduler
from serving.steps.sampling.sampler import INVALID_TOKEN, NO_TOKEN

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
    "{bars}: no token is left that may come next, after {count} tokens of the answer. Allow other "
    "tokens too, or ask for fewer with max_tokens."
)


def of_late_masks(plan: StepPlan) -> list[Failure]:
    """Return the sequences whose tokens of this step should have been masked and were not."""
    bound = [
        chunk.sequence
        for chunk in plan.chunks
        if chunk.samples and chunk.sequence.request.grammar is not None
    ]
    live = [s for s in bound if s.state is not SequenceState.FINISHED and not s.num_discarded]
    logger.warning("Token masks came more than 20 s late: %d sequences end.", len(live))
    return [Failure(sequence, _LATE_MASKS, retryable=True, of_server=True) for sequence in live]


def of_lost_server(
    scheduler: Scheduler, residencies: Residencies, lost: frozenset[str]
) -> list[Failure]:
    """End the sequences of adapters whose LoRA Server is lost, and return them.

    Those that can run without the server are computed anew in place of that.
    """
    servable = residencies.servable_here(lost)
    restarted = scheduler.restart_adapters(servable) if servable else []
    return [
        Failure(
            one,
            _SERVER_FAILED.format(name=one.request.adapter),
            retryable=True,
            of_server=True,
        )
        for one in [*restarted, *scheduler.fail_adapters(lost - servable)]
    ]


def of_bad_logits(results: Iterable[SequenceResult]) -> list[Failure]:
    """Return the sequences whose rows had no token to draw; void results have none."""
    bad = [one for one in results if one.token_id in (INVALID_TOKEN, NO_TOKEN)]
    return [
        _of_row(one.chunk.sequence, one.token_id)
        for one in bad
        if not one.chunk.sequence.num_discarded
    ]


def _of_row(sequence: Sequence, why: int | None) -> Failure:
    """Return the failure of a sequence whose row gave INVALID_TOKEN or NO_TOKEN."""
    if why != NO_TOKEN:
        return Failure(sequence, _NOT_FINITE)
    count = len(sequence.token_ids) - sequence.num_prompt
    bars = _bars(sequence.request.sampling, count)
    if not bars:
        return Failure(sequence, _NOT_FINITE)
    message = _NONE_LEFT.format(bars=" and ".join(bars), count=count)
    return Failure(sequence, message, bad_request=True)


def _bars(sampling: Sampling, count: int) -> list[str]:
    """Return the fields of a request that bar tokens after `count` tokens of its answer."""
    fields = ("allowed_token_ids", "bad_words", "structured_outputs")
    bars = [name for name in fields if getattr(sampling, name)]
    return [*bars, "min_tokens"] if bars and count < sampling.min_tokens else bars
