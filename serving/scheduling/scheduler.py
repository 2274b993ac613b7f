"""Scheduler: chooses the tokens of the next step. Policy only: no jax, no strings.

Every step has a budget of tokens and of logit rows. Running sequences come first (one token each
for those that decode, then chunks of prompts), then waiting ones are let in, always earliest
deadline first. When pages run out, the running sequence with the latest deadline goes back to
waiting and is computed again later, so the one with the earliest deadline always proceeds. The
policy "sjf" puts the shortest job before the earliest deadline; long ones may then starve.

`plan` may be called while one earlier step is still on the device: then the last token of a
decoding sequence is not known here yet, only that it exists. Steps run on the device in the order
in which they were planned, so pages and rows freed here may be given away at once.
"""

import bisect
import dataclasses
import heapq
import random
from collections.abc import Sequence as SequenceOf

from serving.request import (
    FinishReason,
    Progress,
    QueueFull,
    Request,
    Sequence,
    SequenceResult,
    SequenceState,
    StepPlan,
)
from serving.sampling import fold_seed
from serving.scheduling.adapter_gate import AdapterGate, AdapterResidency, NoAdapters
from serving.scheduling.sequence_pages import SequencePages
from serving.scheduling.step_budget import SchedulerLimits, StepBudget

__all__ = ["AdapterResidency", "Progress", "Scheduler", "SchedulerLimits", "SchedulerStats"]

RETRY_AFTER_S = 1.0


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """Positions of the sequences now; counters count from the start."""

    num_running: int
    num_waiting_capacity: int  # for a row, pages or tokens
    num_waiting_adapter: int  # for an adapter slot
    running_adapters: tuple[str, ...]  # names, sorted
    waiting_adapters: tuple[str, ...]
    kv_usage: float  # 0 to 1
    num_preemptions: int
    prefix_queries: int  # tokens
    prefix_hits: int  # tokens


class Scheduler:
    """Plans steps over all live sequences; one thread (the engine's) uses it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        adapters: AdapterResidency | None = None,
        eos_token_ids: SequenceOf[int] = (),
        seed: int = 0,
    ):
        """`seed` is where requests without a seed get theirs."""
        self.limits = limits
        self._gate = AdapterGate(adapters or NoAdapters(), limits.adapter_wait_s)
        self._eos = frozenset(eos_token_ids)
        self._random = random.Random(seed)
        self._pages = SequencePages(
            limits.num_pages,
            limits.page_size,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self._free_rows = list(range(limits.max_num_seqs))
        self._waiting: list[Sequence] = []  # both in order of deadline
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}  # live sequences
        self._num_added = 0
        self._num_preemptions = 0

    # Requests come and go.

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request and return its n sequences.

        Raises QueueFull, or ValueError for a prompt that no step could ever hold or an id in use.
        """
        self._check_fits(request)
        if request.request_id in self._requests:
            raise ValueError(f"There is a request {request.request_id!r} already.")
        sampling, n = request.sampling, request.sampling.n
        if self._waiting and len(self._waiting) + n > self.limits.max_queue:
            raise QueueFull(len(self._waiting), self.limits.max_queue, RETRY_AFTER_S)
        seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
        room = self.limits.max_model_len - len(request.prompt_ids)
        most = min(sampling.max_tokens, room)
        shortest_first = self.limits.scheduling_policy == "sjf"
        sequences = [
            Sequence(
                request=request,
                index=index,
                seed=fold_seed(seed, index),
                token_ids=list(request.prompt_ids),
                number=self._num_added + index,
                max_outputs=most,
                job_tokens=len(request.prompt_ids) + most if shortest_first else 0,
            )
            for index in range(n)
        ]
        self._num_added += n
        self._requests[request.request_id] = list(sequences)
        for sequence in sequences:
            bisect.insort(self._waiting, sequence, key=_order)
            self._pages.open(sequence)
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now; results of steps in flight for it will be ignored."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        else:
            _remove(self._waiting, sequence)
        self._gate.leave(sequence)
        self._gate.forget(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        self._pages.close(sequence)
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.request_id]

    def abort(self, request_id: str) -> list[Sequence]:
        """End all live sequences of a request and return them; unknown requests have none."""
        return self._finish_all(self._requests.get(request_id, ()), FinishReason.ABORT)

    def expired(self, now: float) -> list[Sequence]:
        """End and return the sequences that waited too long for an adapter slot."""
        return self._finish_all(self._gate.expired(now), FinishReason.ERROR)

    def waiting_for(self, digest: str) -> list[Sequence]:
        """Return the waiting sequences of an adapter, e.g. to fail them when it cannot load."""
        return [s for s in self._waiting if s.request.adapter_digest == digest]

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None when nothing can run before something else happens."""
        step = StepBudget(self.limits.max_num_batched_tokens, self.limits.max_logit_rows)
        preemptions = self._num_preemptions
        for sequence in list(self._running):
            if sequence.state is SequenceState.RUNNING and sequence.num_remaining == 1:
                self._continue_decode(step, sequence)
        for sequence in self._running:
            if sequence.num_remaining > 1:
                step.schedule(sequence)
        if self._num_preemptions == preemptions:
            self._admit(step, now)
        for sequence in step.sequences:
            self._pages.register(sequence)
        return step.plan()

    def complete(
        self, plan: StepPlan, results: SequenceOf[SequenceResult], now: float
    ) -> list[Progress]:
        """Take in what a step gave; returns one Progress per sequence that is still alive.

        Ends sequences at EOS, at a stop token and at their length limit.
        """
        for chunk in plan.chunks:
            chunk.sequence.num_in_flight -= 1
        alive = [r for r in results if r.chunk.sequence.state is not SequenceState.FINISHED]
        good = [result for result in alive if not result.chunk.sequence.num_void]
        for result in alive:
            result.chunk.sequence.num_void -= result.chunk.sequence.num_void > 0
        return [self._take_in(result, now) for result in good]

    def fail_adapters(self, digests: frozenset[str]) -> list[Sequence]:
        """End and return the sequences of these adapters that a bad step may have harmed.

        Their prefixes are forgotten; sequences that wait and have nothing in flight stay.
        """
        running = [*self._running, *(s for s in self._waiting if s.num_in_flight)]
        harmed = [s for s in running if s.request.adapter_digest in digests]
        self._finish_all(harmed, FinishReason.ERROR)
        self._pages.forget_adapters(digests)
        return harmed

    def restart_adapters(self, digests: frozenset[str]) -> list[Sequence]:
        """Have the sequences of these adapters, which a bad step may have harmed, computed anew.

        They wait with the tokens of good steps and without their slots; what is in flight is void,
        their prefixes are forgotten. Ends and returns those that still await scores of the prompt.
        """
        mine = [s for s in [*self._running, *self._waiting] if s.request.adapter_digest in digests]
        harmed = [s for s in mine if s.slot >= 0 or s.num_in_flight]
        lost = self._finish_all([s for s in harmed if s.awaits_prompt_logprobs], FinishReason.ERROR)
        for sequence in (s for s in harmed if s.state is not SequenceState.FINISHED):
            self._restart(sequence)
        self._pages.forget_adapters(digests)
        return lost

    @property
    def has_work(self) -> bool:
        """True if any sequence is waiting or running."""
        return bool(self._waiting or self._running)

    def stats(self) -> SchedulerStats:
        """Return where the sequences are."""
        on_adapter = [s for s in self._waiting if self._gate.is_waiting(s)]
        prefix = self._pages.stats
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting_capacity=len(self._waiting) - len(on_adapter),
            num_waiting_adapter=len(on_adapter),
            running_adapters=_adapter_names(self._running),
            waiting_adapters=_adapter_names(self._waiting),
            kv_usage=self._pages.usage,
            num_preemptions=self._num_preemptions,
            prefix_queries=prefix.queries,
            prefix_hits=prefix.hits,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when rows, pages, slots or queues contradict each other."""
        rows = [s.row for s in self._running] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_num_seqs)), f"rows {rows}"
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_order), "a queue is not in order of deadline"
        live = [*self._waiting, *self._running]
        self._pages.check_integrity(live, self._running)
        waiting_with_slot = [s for s in self._waiting if s.slot >= 0]
        self._gate.check_integrity([*self._running, *waiting_with_slot])
        assert sorted(s.number for q in self._requests.values() for s in q) == sorted(
            s.number for s in live
        ), "requests and queues disagree"
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING, sequence.state
            assert sequence.row < 0, "waiting with a row"
            assert not sequence.pages, "waiting with pages"
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING, sequence.state

    # The rest is how.

    def _check_fits(self, request: Request) -> None:
        length, limit = len(request.prompt_ids), self.limits.max_model_len
        if not length:
            raise ValueError("The prompt has no tokens.")
        if length + (request.sampling.max_tokens > 0) > limit:
            raise ValueError(
                f"Input length ({length}) exceeds model's maximum context length ({limit})."
            )
        last = min(length + request.sampling.max_tokens, limit)
        if self._pages.num_pages(last) > self.limits.num_pages:
            raise ValueError(
                f"{last} tokens need {self._pages.num_pages(last)} KV pages; the cache has "
                f"{self.limits.num_pages}. Ask for fewer max_tokens."
            )

    def _finish_all(self, sequences: SequenceOf[Sequence], reason: FinishReason) -> list[Sequence]:
        ended = list(sequences)
        for sequence in ended:
            self.finish(sequence, reason)
        return ended

    def _continue_decode(self, step: StepBudget, sequence: Sequence) -> None:
        """Plan one token, taking pages from sequences with later deadlines if need be."""
        while not self._pages.grow(sequence):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return
        step.schedule(sequence)

    def _preempt(self, victim: Sequence) -> None:
        """Send a running sequence back to waiting. It keeps its adapter slot and its tokens."""
        assert len(self._running) > 1, "one sequence alone always has pages enough"
        self._stop_running(victim)
        victim.state = SequenceState.WAITING
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._num_preemptions += 1
        bisect.insort(self._waiting, victim, key=_order)

    def _restart(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
            sequence.state = SequenceState.WAITING
            bisect.insort(self._waiting, sequence, key=_order)
        self._gate.leave(sequence)
        sequence.num_computed = 0
        sequence.num_scheduled_outputs = len(sequence.output_ids)
        sequence.num_void = sequence.num_in_flight
        sequence.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        self._pages.take_back(sequence)
        _remove(self._running, sequence)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1

    def _admit(self, step: StepBudget, now: float) -> None:
        """Let waiting sequences in, earliest deadline first.

        One that waits for its adapter is passed by; one that waits for pages is not, or a long
        prompt might never get in.
        """
        self._gate.start_round()
        for sequence in list(self._waiting):
            if step.exhausted or not self._free_rows:
                return
            if sequence.num_in_flight or self._follows_sibling(sequence):
                continue
            had_slot = sequence.slot >= 0
            if not self._gate.enter(sequence, now):
                continue
            # Every running sequence is left a page to grow into, so that who enters is not
            # thrown out again at once.
            if not self._pages.give(sequence, reserve=len(self._running)):
                if not had_slot:
                    self._gate.leave(sequence)
                return
            self._start_running(sequence, now)
            step.admit(sequence)

    def _start_running(self, sequence: Sequence, now: float) -> None:
        _remove(self._waiting, sequence)
        bisect.insort(self._running, sequence, key=_order)
        sequence.state = SequenceState.RUNNING
        sequence.row = heapq.heappop(self._free_rows)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now

    def _follows_sibling(self, sequence: Sequence) -> bool:
        """True if another choice of the request is about to compute this one's prompt pages."""
        if not sequence.index or not self._pages.can_match(sequence):
            return False
        for sibling in self._requests[sequence.request.request_id]:
            if sibling.state is SequenceState.RUNNING:
                return not self._pages.prompt_is_findable(sibling)
        return False

    def _take_in(self, result: SequenceResult, now: float) -> Progress:
        sequence, token = result.chunk.sequence, result.token_id
        if not result.chunk.samples:
            end = result.chunk.start + result.chunk.num_tokens
            if not sequence.max_outputs and end == sequence.num_prompt:
                self.finish(sequence, FinishReason.LENGTH)
            return Progress(sequence, result, sequence.finish_reason)
        if token is None:
            raise ValueError(f"No token came back for {sequence.request.request_id}.")
        sequence.token_ids.append(token)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        reason, stop_reason = self._end(sequence, token)
        if reason is not None:
            self.finish(sequence, reason)
        return Progress(sequence, result, reason, stop_reason)

    def _end(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        """Return why the sequence ends with this token, if it does, and at which stop token."""
        sampling = sequence.request.sampling
        num_outputs = len(sequence.token_ids) - sequence.num_prompt
        if num_outputs >= sampling.min_tokens:
            if token in self._eos and not sampling.ignore_eos:
                return FinishReason.STOP, None
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
        if num_outputs >= sequence.max_outputs:
            return FinishReason.LENGTH, None
        return None, None


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    place = bisect.bisect_left(queue, sequence.order, key=_order)
    assert queue[place] is sequence, "the sequence is not where its deadline says"
    del queue[place]


def _adapter_names(sequences: SequenceOf[Sequence]) -> tuple[str, ...]:
    return tuple(sorted({s.request.adapter for s in sequences if s.request.adapter}))
