"""An engine to which prompts come with their KV pages: it decodes, others have prefilled.

The papers' setting (InfiniLoRA, section 2.1), in which TTFT is the time in the queue and of the
first decode step. Here the pages are taken, but what is in them is whatever was there: speed does
not depend on it.
"""

from serving import Engine
from serving.api.request import Sequence
from serving.scheduling.pages.sequence_pages import SequencePages


class PrefilledPages(SequencePages):
    """Pages that hold the KV of all tokens but the last, as if they had been sent along."""

    def give(self, sequence: Sequence, reserve: int) -> bool:
        given = super().give(sequence, reserve)
        if given:
            sequence.num_computed = len(sequence.token_ids) - 1
        return given


def take_prompts_as_prefilled(engine: Engine) -> None:
    """Let an idle engine without prefix caching compute of each prompt its last token only."""
    scheduler, config = engine._parts.loop._parts.scheduler, engine.config
    if config.enable_prefix_caching:
        raise ValueError("Pages of unknown content would be found as prefixes.")
    limits = scheduler.limits
    scheduler._pages = PrefilledPages(
        limits.num_pages, limits.page_size, enable_prefix_caching=False
    )
