"""A request on its way through the engine: input, state and output. No jax.

A request with n > 1 choices becomes n `Sequence`s that share a prompt (and, through the prefix
cache, its pages). The scheduler plans steps over sequences; the model runner executes a
`StepPlan` and never looks at strings.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lora_jax.adapters.task_head import HeadAnswer, TaskHead
from serving.api.images import EncodeImage, PromptImage
from serving.api.sampling import Sampling


class FinishReason(enum.StrEnum):
    """Reason of a sequence's end, in the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class QueueFull(RuntimeError):
    """The waiting queue, or a tenant's part of it, is full; try again after `retry_after_s`.

    The message names the limit, never how much of it others take.
    """

    def __init__(self, limit: str, retry_after_s: float):
        super().__init__(f"{limit} Try again after {retry_after_s:g} s.")
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(frozen=True)
class Share:
    """Limits of one tenant; the tenant "" is everybody without a key.

    Between tenants tokens, rows and pages are divided by `weight` while they are short.
    """

    tenant: str = ""
    weight: float = 1.0
    max_running: int | None = None  # sequences; further ones wait
    max_waiting: int | None = None  # sequences; further ones are QueueFull


class EngineDead(RuntimeError):
    """The engine has stopped after an error or was closed; it takes no more requests."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one token and of the most likely tokens at its place."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: Mapping[int, float]  # token id -> logprob, most likely first


class OutputDelta(NamedTuple):
    """Output of one sequence since the last delta; `on_output` receives these in order.

    The first delta of each sequence may carry the prompt's log-probabilities (first entry None).
    Exactly one delta per sequence has a finish_reason, and it is the last one.
    """

    request_id: str
    index: int  # choice index, 0 <= index < n
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None  # message when finish_reason is ERROR
    retryable: bool = False  # the same request may succeed later (HTTP 503)
    adapter: str | None = None  # that served it, with its version where it has one
    head: HeadAnswer | None = None  # of its adapter's task head, if that was asked
    bad_request: bool = False  # the request is why, and fails whenever it is sent (HTTP 400)


@dataclasses.dataclass(frozen=True)
class TraceContext:
    """Trace that a request is part of: its headers by name, and the caller's id of the request."""

    headers: tuple[tuple[str, str], ...] = ()
    http_request_id: str = ""


@dataclasses.dataclass(frozen=True)
class Request:
    """Validated request of a caller. `adapter_digest` pins the weights it is served with."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    adapter: str | None
    adapter_digest: str  # "" for the base model
    on_output: Callable[[OutputDelta], None]
    arrival_s: float  # time.monotonic()
    deadline_s: float  # monotonic time; waiting requests are served in this order
    cache_salt: str = ""
    tier: str = ""  # where its adapter is: device, host or disk
    share: Share = dataclasses.field(default_factory=Share)
    grammar: Any = None  # compiled; of sampling.structured_outputs
    images: tuple[PromptImage, ...] = ()  # in order
    head: TaskHead | None = None  # that answers in place of the LM head; max_tokens is 0
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens of sampling.bad_words
    trace: TraceContext | None = None  # None: its span, if there is one, has no parent


class SequenceState(enum.Enum):
    """State of a sequence in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """One choice of a request. The scheduler owns the scheduling fields.

    `token_ids` holds the prompt and every sampled token the host has seen. `num_computed` counts
    tokens whose K and V are in pages or in a step that is in flight, so it may run one ahead of
    what the host has seen; `num_scheduled_outputs` counts sampled tokens including those still
    on the device. `num_in_flight` counts planned steps that hold the sequence and are not complete:
    a preempted sequence comes back only when it is 0, so that no sampled token is lost or doubled.
    Results of the next `num_discarded` of them are worth nothing.
    """

    request: Request
    index: int
    seed: int
    token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    row: int = -1  # row of the block tables while running
    slot: int = -1  # adapter slot while running; -1 is the base model
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_scheduled_outputs: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    number: int = 0  # order of arrival in the scheduler
    job_tokens: int = 0  # most tokens it can take where the shortest job comes first, else 0
    max_outputs: int = 0  # tokens to sample at most: max_tokens, or what the model has room for
    num_in_flight: int = 0
    num_discarded: int = 0
    # Of each image while running: its rows of the encoder cache, none if its tokens are cached.
    image_rows: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    num_prompt_logprobs: int = 0  # prompt tokens whose chunk was planned with prompt_logprobs
    finish_reason: FinishReason | None = None
    grammar_state: Any = None  # where the output is in the request's grammar
    draft_state: Any = None  # repetitions of its tokens, where the engine speculates
    # Digest of the adapter in the weights it runs on to its end, "": plain; None: not chosen yet.
    weights: str | None = None

    @property
    def tenant(self) -> str:
        """The caller whose fair share the sequence counts for."""
        return self.request.share.tenant

    @property
    def order(self) -> tuple[int, float, int]:
        """Place within a tenant: the shortest job, the earliest deadline, the earliest arrival."""
        return self.job_tokens, self.request.deadline_s, self.number

    @property
    def num_remaining(self) -> int:
        """Tokens to compute until the next one is sampled; 0: nothing more to plan."""
        scheduled = self.num_scheduled_outputs
        if self.max_outputs and scheduled >= self.max_outputs:
            return 0
        return len(self.request.prompt_ids) + scheduled - self.num_computed

    @property
    def has_ended(self) -> bool:
        """True if it is finished, for whatever reason."""
        return self.state is SequenceState.FINISHED

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt are wanted and not all of them told."""
        return self.request.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Token ids after the prompt that the host has seen."""
        return self.token_ids[self.num_prompt :]


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence in one step.

    `samples` says that the chunk's last token yields the next token. With `prompt_logprobs` every
    token of the chunk that is followed by a prompt token also takes a logit row. Where the host
    has not yet seen the input token (it was sampled by the step in flight), the runner takes the
    row's last sampled token, which stays on the device.

    `drafts` are guesses of the next tokens. They are the chunk's last tokens, each of which yields
    a token too; those that follow a wrong guess are worth nothing.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    prompt_logprobs: bool = False
    by_head: bool = False  # the adapter's task head answers from the chunk's last token
    drafts: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Tokens that the chunk draws, worthless ones included."""
        return self.samples + len(self.drafts)


@dataclasses.dataclass(frozen=True)
class Merged:
    """The adapter in the weights that a step takes, and the slot it holds for the while."""

    digest: str
    slot: int
    name: str  # for people


@dataclasses.dataclass(frozen=True)
class PageMove:
    """A KV page's bytes go to a slot of host memory, or come from there."""

    page: int
    slot: int
    out: bool  # to the host


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: which chunks run, and which rows got a new owner since the last step.

    `admitted` sequences must have their sampling parameters written to their row before the step,
    and towers must have computed `encodes`. A short step leaves out rows that could run, so that
    its results come soon. With `merged` its weights are not the plain ones. `moves` of pages happen
    before the step, in this order.
    """

    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[Sequence, ...] = ()
    encodes: tuple[EncodeImage, ...] = ()
    is_short: bool = False
    merged: Merged | None = None
    moves: tuple[PageMove, ...] = ()

    # Each is asked for several times a step, and looks at every chunk.

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens of all chunks of the step."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @functools.cached_property
    def has_drafts(self) -> bool:
        """True if the next step's positions follow from this step's results."""
        return any(chunk.drafts for chunk in self.chunks)

    @functools.cached_property
    def is_bound(self) -> bool:
        """True if a grammar binds a token that the step draws."""
        for chunk in self.chunks:
            if chunk.samples and chunk.sequence.request.grammar is not None:
                return True
        return False

    @property
    def is_mixture(self) -> bool:
        """True if rows of other adapters run on merged weights."""
        digest = None if self.merged is None else self.merged.digest
        rows = (chunk.sequence.request.adapter_digest for chunk in self.chunks)
        return digest is not None and any(row != digest for row in rows)


class SequenceResult(NamedTuple):
    """Result of a finished step for one chunk: the sampled token and the asked-for logprobs.

    `more` are results of the chunk's drafts that were right, in order.
    """

    chunk: ScheduledChunk
    token_id: int | None  # None when the chunk does not sample
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for tokens start + 1 .. of the prompt
    head: Any = None  # float32 [width], logits of the task head; token_id says if they are bad
    more: tuple["SequenceResult", ...] = ()


class Failure(NamedTuple):
    """A sequence that ends with an error, and why; two flags are those of `OutputDelta`."""

    sequence: Sequence
    why: str
    retryable: bool = False
    bad_request: bool = False
    of_server: bool = False  # it says nothing of the adapter

    @property
    def flags(self) -> dict[str, bool]:
        """The flags by name."""
        return dict(zip(self._fields[2:], self[2:], strict=True))


class Progress(NamedTuple):
    """Effect of a finished step on one live sequence; its token is already in `token_ids`."""

    sequence: Sequence
    result: SequenceResult
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
