"""Scheduler: chooses the tokens of the next step. Policy only: no jax, no strings.

Every step has a budget of tokens and of logit rows. Running sequences come first (one token each
for those that decode, then chunks of prompts), then waiting ones are admitted, always earliest
deadline first. When pages run out, the running sequence with the latest deadline goes back to
waiting and is computed again later, so the one with the earliest deadline always proceeds. The
policy "sjf" puts the shortest job before the earliest deadline; long ones may then starve.

Between tenants `fair_share` decides whose prompt is next; that order is the one within a tenant.
A tenant below its share of rows or pages gets them at the next step, by preemption.

`plan` may be called while one earlier step is still on the device: then the last token of a
decoding sequence is not known here yet, only that it exists. Steps run on the device in the order
in which they were planned, so pages and rows freed here may be given away at once. Only a step with
drafts must be complete before the next plan.
"""

import collections
import random
from collections.abc import Container
from collections.abc import Sequence as SequenceOf

from serving.api.request import (
    FinishReason,
    Progress,
    Request,
    Sequence,
    SequenceResult,
    SequenceState,
    StepPlan,
)
from serving.scheduling.adapter_gate import AdapterGate, AdapterResidency, NoAdapters
from serving.scheduling.claims import Claims, decode_order
from serving.scheduling.endings import take_in
from serving.scheduling.entry_checks import check_fits, check_room
from serving.scheduling.fair_share import FairShares
from serving.scheduling.integrity import check_queues
from serving.scheduling.merge_modes import MergeModes
from serving.scheduling.new_sequences import new_sequences
from serving.scheduling.running_line import RunningLine
from serving.scheduling.sequence_pages import SequencePages
from serving.scheduling.short_steps import ShortStep, short_step
from serving.scheduling.slot_claims import SlotClaims
from serving.scheduling.speculation import Speculation
from serving.scheduling.stats import SchedulerStats, scheduler_stats
from serving.scheduling.step_budget import SchedulerLimits, StepBudget
from serving.scheduling.waiting_line import WaitingLine, prompts_by_tenant

__all__ = ["AdapterResidency", "Progress", "Scheduler", "SchedulerLimits", "SchedulerStats"]


class Scheduler:
    """Plans steps over all live sequences; one thread (the engine's) uses it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        adapters: AdapterResidency | None = None,
        eos_token_ids: SequenceOf[int] = (),
        seed: int = 0,
        modes: MergeModes | None = None,
        speculation: Speculation | None = None,
    ):
        """`seed` is where requests without a seed get theirs."""
        self.limits, self.modes, self._speculation = limits, modes, speculation
        residency = adapters or NoAdapters()
        self._gate = AdapterGate(residency, limits.adapter_wait_s)
        self._eos = frozenset(eos_token_ids)
        self._random = random.Random(seed)
        sizes = limits.num_pages, limits.page_size, limits.num_encoder_rows
        self._pages = SequencePages(*sizes, enable_prefix_caching=limits.enable_prefix_caching)
        self._waiting = WaitingLine()
        self._running = RunningLine(limits.max_num_seqs)
        self._fair = FairShares()
        self._slot_claims = SlotClaims(self._fair, self._gate, residency)
        self._requests: dict[str, list[Sequence]] = {}  # live sequences
        self._num_added = 0
        self._num_preemptions = 0

    # Requests come and go.

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request and return its n sequences.

        Raises QueueFull, or ValueError for a prompt that no step could ever hold or an id in use.
        """
        check_fits(request, self.limits)
        if request.request_id in self._requests:
            raise ValueError(f"There is a request {request.request_id!r} already.")
        sampling, n = request.sampling, request.sampling.n
        check_room(request.share, n, self._waiting, self._fair, self.limits.max_queue)
        seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
        sequences = new_sequences(request, self.limits, seed=seed, number=self._num_added)
        self._num_added += n
        self._requests[request.request_id] = list(sequences)
        self._fair.enter(request.share, n, begins=not self._waiting.count(request.share.tenant))
        for sequence in sequences:
            self._waiting.add(sequence)
            self._pages.open(sequence)
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now; results of steps in flight for it will be ignored."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        else:
            self._waiting.remove(sequence)
        self._fair.leave(sequence.tenant)
        self._gate.leave(sequence)
        self._gate.forget(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        self._pages.close(sequence)
        if self.modes is not None:
            self.modes.leave(sequence)
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
        if self.modes is None:
            return self._plan_step(now)
        plan, starving = None, self._gate.is_starving
        for weights in self.modes.begin(self._running, self._waiting, now, starving=starving):
            self.modes.take(weights)
            plan = self._plan_step(now)
            if plan is not None:
                break
        return self.modes.end(plan, self._running, now)

    def _plan_step(self, now: float) -> StepPlan | None:
        """Return the next step, with merged weights that of their sequences alone."""
        self._pages.start_step()
        step = StepBudget(self.limits.max_num_batched_tokens, self.limits.max_logit_rows)
        order, short = list(self._running), ShortStep()
        if self._fair.are_shared:
            self._claim_slots(now)
            self._claim(now)
            order = decode_order(self._running, self._fair, self.limits.num_pages)
            rows = self.limits.max_num_seqs
            short = short_step(self._fair, order, self._waiting.tenants, rows)
            order = short.order(order)
        preemptions = self._num_preemptions
        crowd = [sequence for sequence in order if sequence.tenant in short.crowds]
        self._decode(step, order[: len(order) - len(crowd)], order)
        if not self._fill_short(step, short, now, self._num_preemptions == preemptions):
            self._decode(step, crowd, order)
            self._fill(step, now, admitting=self._num_preemptions == preemptions)
        if self._speculation is not None:
            self._speculation.extend(step, self._pages, len(self._running))
        for sequence in step.sequences:
            self._pages.register(sequence)
        return step.plan(self._pages.take_encodes())

    def complete(
        self, plan: StepPlan, results: SequenceOf[SequenceResult], now: float
    ) -> list[Progress]:
        """Take in what a step gave; returns a Progress of each token. Sequences go on, or end
        at EOS, at a stop token or at their length limit.
        """
        for chunk in plan.chunks:
            chunk.sequence.num_in_flight -= 1
        alive = [r for r in results if r.chunk.sequence.state is not SequenceState.FINISHED]
        good = [result for result in alive if not result.chunk.sequence.num_discarded]
        for result in alive:
            result.chunk.sequence.num_discarded -= result.chunk.sequence.num_discarded > 0
        if self._speculation is not None:
            self._speculation.complete(plan, good, self._fair, now)
        drawn = (one for result in good for one in (result, *result.more))
        return [self._process_result(one, now) for one in drawn if not one.chunk.sequence.has_ended]

    def fail_adapters(self, digests: frozenset[str]) -> list[Sequence]:
        """End and return the sequences of these adapters that a bad step may have affected.

        Their prefixes are forgotten; sequences that wait and have nothing in flight stay.
        """
        running = [*self._running, *(s for s in self._waiting if s.num_in_flight)]
        affected = [s for s in running if s.request.adapter_digest in digests]
        self._finish_all(affected, FinishReason.ERROR)
        self._pages.forget_adapters(digests)
        return affected

    def restart_adapters(self, digests: frozenset[str]) -> list[Sequence]:
        """Have the sequences of these adapters, which a bad step may have affected, computed anew.

        They wait with the tokens of good steps and without their slots; what is in flight is void,
        their prefixes are forgotten. Ends and returns those that still await scores of the prompt.
        """
        selected = [
            s for s in [*self._running, *self._waiting] if s.request.adapter_digest in digests
        ]
        affected = [s for s in selected if s.slot >= 0 or s.num_in_flight]
        scored = [s for s in affected if s.awaits_prompt_logprobs]
        lost = self._finish_all(scored, FinishReason.ERROR)
        for sequence in (s for s in affected if s.state is not SequenceState.FINISHED):
            self._restart(sequence)
        self._pages.forget_adapters(digests)
        return lost

    @property
    def has_work(self) -> bool:
        """True if any sequence is waiting or running."""
        return bool(self._waiting or self._running)

    def stats(self) -> SchedulerStats:
        """Return where the sequences are."""
        counts = self._gate, self._pages, self._num_preemptions
        return scheduler_stats(self._running, self._waiting, *counts)

    def check_integrity(self) -> None:
        """Raise AssertionError when rows, pages, slots or queues contradict each other."""
        check_queues(self._running, self._waiting, self._requests)
        live = [*self._waiting, *self._running]
        tenants = (collections.Counter(s.tenant for s in queue) for queue in (live, self._running))
        self._fair.check_integrity(*tenants)
        self._pages.check_integrity(live, self._running)
        self._gate.check_integrity([*self._running, *(s for s in self._waiting if s.slot >= 0)])
        if self.modes is not None:
            self.modes.check_integrity(live)

    # The rest is how.

    def _finish_all(self, sequences: SequenceOf[Sequence], reason: FinishReason) -> list[Sequence]:
        ended = list(sequences)
        for sequence in ended:
            self.finish(sequence, reason)
        return ended

    def _decode(
        self, step: StepBudget, sequences: SequenceOf[Sequence], order: SequenceOf[Sequence]
    ) -> None:
        """Plan a token of each that decodes, taking pages from the last of `order` if need be."""
        if self.modes is not None:
            sequences = list(filter(self.modes.joins, sequences))
        for sequence in sequences:
            if sequence.state is SequenceState.RUNNING and sequence.num_remaining == 1:
                self._continue_decode(step, sequence, order)

    def _continue_decode(
        self, step: StepBudget, sequence: Sequence, order: SequenceOf[Sequence]
    ) -> None:
        while not self._pages.grow(sequence):
            last = next(s for s in reversed(order) if s.state is SequenceState.RUNNING)
            assert len(self._running) > 1, "one sequence alone always has pages enough"
            self._preempt(last)
            if last is sequence:
                return
        step.schedule(sequence)
        self._fair.charge(sequence.tenant, 1)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to waiting. It keeps its adapter slot and its tokens."""
        self._stop_running(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.add(sequence)

    def _restart(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
            sequence.state = SequenceState.WAITING
            self._waiting.add(sequence)
        self._gate.leave(sequence)
        sequence.num_computed = 0
        sequence.num_scheduled_outputs = len(sequence.output_ids)
        sequence.num_discarded = sequence.num_in_flight
        sequence.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        self._pages.take_back(sequence)
        self._running.remove(sequence)
        self._fair.stop(sequence.tenant)

    def _fill_short(self, step: StepBudget, short: ShortStep, now: float, admitting: bool) -> bool:
        """Give a short step to those it is for; False when none of their prompts can run."""
        if not short.callers:
            return False
        before = len(step.sequences)
        self._fill(step, now, admitting=admitting, tenants=short.callers)
        served = frozenset(sequence.tenant for sequence in step.sequences[before:])
        idle = [s for s in self._running if s.tenant in short.crowds and s.num_remaining]
        short.charge(self._fair, served, len(idle))
        step.is_short = bool(served)
        return step.is_short

    def _fill(
        self, step: StepBudget, now: float, *, admitting: bool, tenants: Container[str] = ()
    ) -> None:
        """Give what is left of the step to prompts: running ones, then waiting ones, by tenant.

        One that waits for its adapter is passed by; one that waits for pages is not, or a long
        prompt might never get in.
        """
        self._gate.start_round()
        lines = prompts_by_tenant(self._running, self._waiting)
        lines = {t: line for t, line in lines.items() if not tenants or t in tenants}
        if not lines:
            self._fair.settle()
        if self.modes is not None:
            lines = {t: filter(self.modes.joins, line) for t, line in lines.items()}
        while lines and not step.exhausted:
            tenant = self._fair.first(lines)
            may_admit = admitting and self._running.num_free_rows > 0
            sequence, tokens = next(lines[tenant], None), step.tokens
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                step.schedule(sequence)
            elif sequence and may_admit and self._fair.may_run_more(tenant):
                admitting = self._admit(sequence, step, now)
            else:
                del lines[tenant]
            self._fair.charge(tenant, tokens - step.tokens)

    def _admit(self, sequence: Sequence, step: StepBudget, now: float) -> bool:
        """Let a waiting sequence run if it can; False when pages are short for it."""
        if sequence.num_in_flight or self._follows_sibling(sequence):
            return True
        had_slot = sequence.slot >= 0
        if not self._gate.enter(sequence, now):
            return True
        if self.modes is not None:
            for chosen in self.modes.choose(self._requests[sequence.request.request_id]):
                self._pages.open(chosen)  # its pages are others' than those on plain weights
        # Every running sequence is left a page to grow into, so that one that enters is not
        # preempted again at once.
        if not self._pages.give(sequence, reserve=len(self._running)):
            if not had_slot:
                self._gate.leave(sequence)
            return False
        self._start_running(sequence, now)
        step.admit(sequence)
        return True

    def _claim_slots(self, now: float) -> None:
        """Have sequences of tenants beyond their share of adapter slots give up theirs."""
        for claimant, yielding in self._slot_claims.due([*self._running, *self._waiting], now):
            for sequence in yielding:
                if sequence.state is SequenceState.RUNNING:
                    self._preempt(sequence)
                self._gate.leave(sequence)
            self._gate.enter(claimant, now)

    def _claim(self, now: float) -> None:
        """Preempt sequences of tenants beyond their share for tenants that are below theirs."""
        free = {"free_rows": self._running.num_free_rows, "free_pages": self._pages.num_free}
        rows, pages = self.limits.max_num_seqs, self.limits.num_pages
        claims = Claims(self._fair, self._running, rows=rows, pages=pages, **free)
        if not claims.are_possible:
            return
        self._gate.start_round()
        for tenant in self._fair.ordered(self._waiting.tenants):
            asked: set[str] = set()  # of several choices the first one computes the prompt
            for sequence in self._waiting.of(tenant):
                if not claims.may_run(tenant):
                    break
                request_id = sequence.request.request_id
                waits = sequence.num_in_flight or self._follows_sibling(sequence)
                if request_id in asked or waits or not self._gate.enter(sequence, now):
                    continue
                asked.add(request_id)
                pages = self._pages.num_pages(len(sequence.token_ids))
                for taken in claims.make_room(tenant, pages):
                    self._preempt(taken)

    def _start_running(self, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        self._fair.start(sequence.tenant)
        sequence.state = SequenceState.RUNNING
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now

    def _follows_sibling(self, sequence: Sequence) -> bool:
        return self._pages.follows(sequence, self._requests[sequence.request.request_id])

    def _process_result(self, result: SequenceResult, now: float) -> Progress:
        progress = take_in(result, now, self._eos)
        if progress.finish_reason is not None:
            self.finish(progress.sequence, progress.finish_reason)
        return progress
