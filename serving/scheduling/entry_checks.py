"""Checks of a request, and of free room, before it is queued. No jax."""

from serving.api.request import QueueFull, Request, Share
from serving.scheduling.fair_share import FairShares
from serving.scheduling.step_budget import SchedulerLimits
from serving.scheduling.waiting_line import WaitingLine

RETRY_AFTER_S = 1.0


def check_fits(request: Request, limits: SchedulerLimits) -> None:
    """Raise ValueError for a prompt that no step could ever hold."""
    length, limit = len(request.prompt_ids), limits.max_model_len
    if not length:
        raise ValueError("The prompt has no tokens.")
    if length + (request.sampling.max_tokens > 0) > limit:
        raise ValueError(
            f"Input length ({length}) exceeds model's maximum context length ({limit})."
        )
    rows = sum({i.key: i.image.num_tokens for i in request.images}.values())
    if rows > limits.num_encoder_rows:
        raise ValueError(
            f"The images of the prompt have {rows} tokens; the encoder cache has room for "
            f"{limits.num_encoder_rows}. Send fewer or smaller images."
        )
    last = min(length + request.sampling.max_tokens, limit)
    pages = -(-last // limits.page_size)
    if pages > limits.num_pages:
        raise ValueError(
            f"{last} tokens need {pages} KV pages; the cache has {limits.num_pages}. "
            "Ask for fewer max_tokens."
        )


def check_room(
    share: Share, n: int, waiting: WaitingLine, fair: FairShares, max_queue: int
) -> None:
    """Raise QueueFull when n more sequences are beyond the tenant's limit or beyond the queue's.

    A tenant alone may fill the queue. Beside others it may always have its share of it, and one
    request where it has none. Raises ValueError where n alone is beyond the tenant's limit.
    """
    queued, limit = waiting.count(share.tenant), share.max_waiting
    if limit is not None and n > limit:
        raise ValueError(f"n={n} is more than max_waiting={limit}, the key's limit of sequences.")
    if limit is not None and queued + n > limit:
        raise QueueFull(
            f"The key's limit of waiting sequences is max_waiting={limit}.", RETRY_AFTER_S
        )
    if queued and len(waiting) + n > max_queue and queued + n > fair.share_of(share, max_queue):
        raise QueueFull(f"The waiting queue is full: max_queue={max_queue}.", RETRY_AFTER_S)
