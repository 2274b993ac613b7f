"""A request between submit and its last delta: turns tokens into deltas and keeps its times."""

from collections.abc import Callable

from serving.api.request import (
    FinishReason,
    HeadAnswer,
    OutputDelta,
    Request,
    Sequence,
    SequenceResult,
    TokenLogprobs,
)
from serving.engine.metrics.histograms import FinishedRequest
from serving.engine.metrics.metrics import EngineMetrics
from serving.scheduling.scheduler import Progress
from serving.text.detokenizer import Detokenizer
from serving.text.tokenizer import Tokenizer


class LiveRequest:
    """All choices of one request; the engine's thread uses it."""

    def __init__(
        self,
        request: Request,
        sequences: list[Sequence],
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
    ):
        self.request = request
        self._metrics = metrics
        self._choices = [_Choice(sequence, tokenizer) for sequence in sequences]
        self._num_open = len(self._choices)
        self._first_token_s: float | None = None
        self._counted = False  # whether the metrics know of the prompt
        self._is_bad_request = False  # of a choice that ended with an error
        self._is_of_server = False  # so too

    @property
    def done(self) -> bool:
        """True if every choice has ended."""
        return not self._num_open

    def unfinished(self) -> list[Sequence]:
        """Return the choices that have not ended."""
        return [choice.sequence for choice in self._choices if choice.finish_reason is None]

    def deliver(
        self,
        progress: Progress,
        now: float,
        ending: Callable[["LiveRequest", Sequence, bool], None] = lambda *_: None,
    ) -> None:
        """Hand out what a step gave one choice.

        Before a choice's last delta goes out, `ending` is called with the request, the choice's
        sequence, and whether a stop string ended it: then the scheduler does not know yet. Tokens
        that come after the end are ignored.
        """
        sequence, result, reason, _ = progress
        choice = self._choices[sequence.index]
        if choice.finish_reason is not None:
            return
        if result.token_id is not None:
            last_s, choice.last_token_s = choice.last_token_s, now
            if last_s is None:
                self._time_first(now)
            else:
                self._metrics.token_gap(now - last_s)
        delta = choice.take_plain(result) if reason is None else None
        if delta is None:
            delta = choice.take(progress)
            if delta is None:
                return
        if not self._counted:
            self._counted, cached = True, choice.sequence.num_cached_tokens
            self._metrics.prompt_scheduled(len(self.request.prompt_ids) - cached, cached)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            self._num_open -= 1
            ending(self, sequence, reason is None)
        self.request.on_output(delta)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None,
        *,
        retryable: bool = False,
        bad_request: bool = False,
        of_server: bool = False,
    ) -> None:
        """Send the last delta of a choice that ends from outside; ended ones stay as they are.

        An error `of_server` says nothing of the adapter: there was no room, or no LoRA Server.
        """
        choice = self._choices[sequence.index]
        if choice.finish_reason is not None:
            return
        choice.finish_reason = reason  # first: a callback that raises must not be called again
        self._num_open -= 1
        self._is_bad_request |= bad_request
        self._is_of_server |= of_server
        delta = choice.last_delta(reason, error, retryable)
        self.request.on_output(delta._replace(bad_request=bad_request))

    def summary(self, now: float) -> FinishedRequest:
        """Return what the metrics say of the request when all choices have ended."""
        sequences = [choice.sequence for choice in self._choices]
        scheduled = [s.first_scheduled_s for s in sequences if s.first_scheduled_s is not None]
        return FinishedRequest(
            adapter=self.request.adapter,
            reasons=tuple(str(choice.finish_reason) for choice in self._choices),
            num_prompt=len(self.request.prompt_ids),
            num_cached=max(s.num_cached_tokens for s in sequences),
            output_lengths=tuple(choice.num_tokens for choice in self._choices),
            max_tokens=self.request.sampling.max_tokens,
            arrival_s=self.request.arrival_s,
            scheduled_s=min(scheduled, default=None),
            first_token_s=self._first_token_s,
            finished_s=now,
            preemptions=sum(s.num_preemptions for s in sequences),
            tier=self.request.tier,
            bad_request=self._is_bad_request,
            of_server=self._is_of_server,
            by_head=self.request.head is not None,
            logprob_sum=sum(choice.logprob_sum for choice in self._choices),
            num_logprobs=sum(choice.num_logprobs for choice in self._choices),
        )

    def _time_first(self, now: float) -> None:
        """Note the first token of a choice."""
        if self._first_token_s is None:
            self._first_token_s = now
            self._metrics.first_token(now - self.request.arrival_s)


class _Choice:
    """One sequence: its text so far, and log-probabilities that wait for their delta."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer):
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.last_token_s: float | None = None
        self.num_tokens = self.num_logprobs = 0
        self.logprob_sum = 0.0
        sampling = sequence.request.sampling
        self._detokenizer = None
        if sampling.detokenize:
            self._detokenizer = Detokenizer(tokenizer, sequence.request.prompt_ids, sampling)
        self._wants_prompt = sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        # Whether a token of the choice is its text and nothing else, until it ends.
        self._is_plain = not (self._wants_prompt or sampling.stop or sampling.logprobs is not None)
        self._is_plain = self._is_plain and sequence.request.head is None

    def take_plain(self, result: SequenceResult) -> OutputDelta | None:
        """Return what `take` does of a token after which the choice goes on; None: `take` must.

        Nearly all tokens are such. Their deltas skip the constructor, which takes as long as the
        rest.
        """
        token = result.token_id
        if token is None or not self._is_plain:
            return None
        self.num_tokens += 1
        sequence, detokenizer = self.sequence, self._detokenizer
        request = sequence.request
        text = "" if detokenizer is None else detokenizer.push(token)[0]
        fields = (
            request.request_id,
            sequence.index,
            text,
            (token,),
            (),  # logprobs
            None,  # prompt_logprobs
            None,  # finish_reason
            None,  # stop_reason
            sequence.num_cached_tokens,
            None,  # error
            False,  # retryable
            request.adapter,
            None,  # head
            False,  # bad_request
        )
        return tuple.__new__(OutputDelta, fields)

    def take(self, progress: Progress) -> OutputDelta | None:
        """Return the delta of one step's result, or None when there is nothing to say yet."""
        result, reason, stop_reason = progress.result, progress.finish_reason, progress.stop_reason
        self._prompt_logprobs += result.prompt_logprobs
        token = result.token_id
        if token is None and reason is None:
            return None
        text = ""
        if token is not None:
            self.num_tokens += 1
            if result.logprobs is not None:
                self.logprob_sum += result.logprobs.logprob
                self.num_logprobs += 1
            text, stop_string = self._text(token, reason, stop_reason)
            if stop_string is not None:
                reason, stop_reason = FinishReason.STOP, stop_string
        head = None
        if result.head is not None and self.sequence.request.head is not None:
            head = self.sequence.request.head.answer(result.head)
            text = head.text
        return self._delta(
            text,
            () if token is None else (token,),
            () if result.logprobs is None else (result.logprobs,),
            reason,
            stop_reason,
            head=head,
        )

    def last_delta(
        self, reason: FinishReason, error: str | None = None, retryable: bool = False
    ) -> OutputDelta:
        """Return the delta that ends the choice from outside, with the text still held back."""
        text = "" if self._detokenizer is None else self._detokenizer.finish()
        return self._delta(text, (), (), reason, error=error, retryable=retryable)

    def _text(
        self, token: int, reason: FinishReason | None, stop_reason: str | int | None
    ) -> tuple[str, str | None]:
        """Return the text that is settled with this token, and the stop string that was met."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", None
        sampling = self.sequence.request.sampling
        if reason is FinishReason.STOP and not sampling.include_stop_str_in_output:
            return detokenizer.finish(), None  # the token that ended it has no text of its own
        text, stop_string = detokenizer.push(token)
        if stop_string is None and reason is not None:
            text += detokenizer.finish()
        return text, stop_string

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None = None,
        *,
        error: str | None = None,
        retryable: bool = False,
        head: HeadAnswer | None = None,
    ) -> OutputDelta:
        request, prompt_logprobs = self.sequence.request, None
        if self._wants_prompt and len(self._prompt_logprobs) == len(request.prompt_ids):
            prompt_logprobs, self._wants_prompt = tuple(self._prompt_logprobs), False
        return OutputDelta(
            request.request_id,
            self.sequence.index,
            text,
            token_ids,
            logprobs,
            prompt_logprobs,
            finish_reason,
            stop_reason,
            self.sequence.num_cached_tokens,
            error,
            retryable,
            request.adapter,
            head,
        )
