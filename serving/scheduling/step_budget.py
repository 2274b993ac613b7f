"""Budget of one step: tokens, logit rows and the chunks that use them. No jax."""

import dataclasses
from collections.abc import Callable

from serving.api.images import EncodeImage
from serving.api.request import PageMove, ScheduledChunk, Sequence, StepPlan


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Sizes the scheduler plans within; tokens, rows and pages of one engine."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    mixed_step_tokens: int | None = None  # see StepBudget.bound_prompts; None: no bound
    max_logit_rows: int = 64
    max_queue: int = 1024
    adapter_wait_s: float = 600.0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # or "sjf"
    num_encoder_rows: int = 0  # of the encoder cache
    num_host_pages: int = 0  # KV pages that host memory has room for

    def __post_init__(self) -> None:
        for field in ("max_num_batched_tokens", "mixed_step_tokens", "max_logit_rows"):
            size = getattr(self, field)
            if size is not None and size < self.max_num_seqs:
                raise ValueError(
                    f"{field} ({size}) must be at least max_num_seqs ({self.max_num_seqs}), "
                    f"so that every running sequence can decode."
                )


MIXED_PER_SEQUENCE = 8  # tokens of a step for each sequence that decodes in it


class StepBudget:
    """Collects the chunks of one step within its two budgets."""

    def __init__(self, tokens: int, logit_rows: int):
        self.tokens = tokens
        self.logit_rows = logit_rows
        self._chunks: list[ScheduledChunk] = []
        self._admitted: list[Sequence] = []
        self.is_short = False

    @property
    def exhausted(self) -> bool:
        """True if no further sequence can get a chunk."""
        return not (self.tokens and self.logit_rows)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """The chunks so far."""
        return list(self._chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that got a chunk."""
        return [chunk.sequence for chunk in self._chunks]

    def admit(self, sequence: Sequence) -> None:
        """Note that the sequence has a new row, and give it its first chunk."""
        self._admitted.append(sequence)
        self.schedule(sequence)

    def bound_prompts(self, mixed_tokens: int) -> None:
        """Leave prompts less where sequences decode: those that have their chunk by now.

        The step then has at most `mixed_tokens`, or 8 for each of these sequences if that is more.
        A token that decodes costs nearly nothing beside so many tokens of prompts, which keep the
        device's arithmetic busy: with short steps more of them have that company. With many
        sequences prompts get more, or those that wait would have few tokens of each step.
        """
        decoding = len(self._chunks)
        if decoding:
            most = max(mixed_tokens, MIXED_PER_SEQUENCE * decoding) - decoding
            self.tokens = min(self.tokens, most)

    def schedule(self, sequence: Sequence) -> None:
        """Give a running sequence as many of its remaining tokens as fit, maybe none.

        Prompt log-probabilities cost one logit row per token. Those that an earlier chunk took
        before a preemption are not computed again.
        """
        start, remaining = sequence.num_computed, sequence.num_remaining
        if remaining == 1 and self._decode(sequence, start):
            return
        num_tokens = min(remaining, self.tokens)
        wants_scores = sequence.request.sampling.prompt_logprobs is not None
        scores = wants_scores and start < sequence.num_prompt - 1
        if scores and start < sequence.num_prompt_logprobs:
            num_tokens, scores = min(num_tokens, sequence.num_prompt_logprobs - start), False
        if scores:
            num_tokens = min(num_tokens, self.logit_rows)
        samples = num_tokens == remaining and sequence.max_outputs > 0
        rows = int(samples)
        if scores:
            rows += min(start + num_tokens, sequence.num_prompt - 1) - start
        if num_tokens < 1 or rows > self.logit_rows:
            return
        by_head = sequence.request.head is not None and num_tokens == remaining
        chunk = ScheduledChunk(sequence, start, num_tokens, samples, scores, by_head)
        self._chunks.append(chunk)
        self.tokens -= num_tokens
        self.logit_rows -= rows
        sequence.num_computed += num_tokens
        sequence.num_scheduled_outputs += samples
        sequence.num_in_flight += 1
        if scores:
            sequence.num_prompt_logprobs = start + num_tokens

    def _decode(self, sequence: Sequence, start: int) -> bool:
        """Give a sequence behind its prompt the token that follows; False where `schedule` must.

        Nearly all chunks are such. They skip the constructor, which takes as long as the rest.
        """
        request = sequence.request
        behind = start >= len(request.prompt_ids) and sequence.max_outputs > 0
        if not behind or request.head is not None or not (self.tokens and self.logit_rows):
            return False
        fields = (sequence, start, 1, True, False, False, ())
        self._chunks.append(tuple.__new__(ScheduledChunk, fields))
        self.tokens -= 1
        self.logit_rows -= 1
        sequence.num_computed = start + 1
        sequence.num_scheduled_outputs += 1
        sequence.num_in_flight += 1
        return True

    def add_drafts(self, index: int, drafts: tuple[int, ...]) -> None:
        """Let the chunk at `index`, which draws a token, go on with guesses of the next ones."""
        chunk, count = self._chunks[index], len(drafts)
        if count > min(self.tokens, self.logit_rows):
            raise ValueError(f"{count} drafts; {self.tokens} tokens, {self.logit_rows} rows left.")
        longer = chunk.num_tokens + count
        self._chunks[index] = chunk._replace(num_tokens=longer, drafts=drafts)
        self.tokens -= count
        self.logit_rows -= count
        chunk.sequence.num_computed += count
        chunk.sequence.num_scheduled_outputs += count

    def plan(
        self,
        encodes: tuple[EncodeImage, ...] = (),
        take_moves: Callable[[], tuple[PageMove, ...]] = tuple,
    ) -> StepPlan | None:
        """Return the step; None when nobody got a chunk. Before it towers compute `encodes`, and
        pages move that `take_moves` then gives.
        """
        if not self._chunks:
            return None
        chunks, admitted = tuple(self._chunks), tuple(self._admitted)
        return StepPlan(chunks, admitted, encodes, self.is_short, moves=take_moves())
