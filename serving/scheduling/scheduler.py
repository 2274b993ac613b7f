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
from collections.abc import Container
from collections.abc import Sequence as SequenceOf

from serving.api.request import (
    Progress,
    Sequence,
    SequenceResult,
    SequenceState,
    StepPlan,
)
from serving.scheduling.adapter_gate import AdapterResidency
from serving.scheduling.claims import Claims, decode_order
from serving.scheduling.endings import take_in
from serving.scheduling.live_sequences import LiveSequences
from serving.scheduling.short_steps import NOT_SHORT, ShortStep, short_step
from serving.scheduling.stats import SchedulerStats
from serving.scheduling.step_budget import SchedulerLimits, StepBudget
from serving.scheduling.waiting_line import prompts_by_tenant

__all__ = ["AdapterResidency", "Progress", "Scheduler", "SchedulerLimits", "SchedulerStats"]


class Scheduler(LiveSequences):
    """Plans steps over all live sequences; one thread (the engine's) uses it."""

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
        # At least one: a waiting sequence may get the row of another tenant.
        num_idle = min(max(1, self._running.num_free_rows), len(self._waiting))
        starving = self._gate.is_starving
        self._pages.start_step(len(self._running), num_idle, is_starving=starving)
        if not self.has_work:
            self._gate.hold((), 0)
            return None
        step = StepBudget(self.limits.max_num_batched_tokens, self.limits.max_logit_rows)
        order, short = list(self._running), NOT_SHORT
        if self._fair.are_shared:
            self._claim_slots(now)
            self._claim(now)
            order = decode_order(order, self._fair, self.limits.num_pages)
            rows = self.limits.max_num_seqs
            short = short_step(self._fair, order, self._waiting.tenants, rows)
            order = short.order(order)
        preemptions = self._num_preemptions
        crowd = [s for s in order if s.tenant in short.crowds] if short.crowds else []
        if len(order) > len(crowd):
            self._decode(step, order[: len(order) - len(crowd)], order)
        if self.limits.mixed_step_tokens is not None:
            step.bound_prompts(self.limits.mixed_step_tokens)
        if not self._fill_short(step, short, now, self._num_preemptions == preemptions):
            if crowd:
                self._decode(step, crowd, order)
            self._fill(step, now, admitting=self._num_preemptions == preemptions)
        if self._speculation is not None:
            self._speculation.extend(step, self._pages, len(self._running))
        self._pages.register_all(step.sequences)
        plan = step.plan(self._pages.take_encodes(), self._pages.take_moves)
        if plan is not None:
            self._pages.planned(now)
        return plan

    def complete(
        self, plan: StepPlan, results: SequenceOf[SequenceResult], now: float
    ) -> list[Progress]:
        """Take in what a step gave; returns a Progress of each token. Sequences go on, or end
        at EOS, at a stop token or at their length limit.
        """
        self._pages.completed(plan.num_tokens, len(plan.chunks), now)
        for chunk in plan.chunks:
            chunk.sequence.num_in_flight -= 1
        good, ended = [], SequenceState.FINISHED
        for result in results:
            sequence = result.chunk.sequence
            if sequence.state is ended:
                continue
            if sequence.num_discarded:
                sequence.num_discarded -= 1
            else:
                good.append(result)
        if self._speculation is not None:
            self._speculation.complete(plan, good, self._fair, now)
        progress = []
        for result in good:
            for one in (result, *result.more) if result.more else (result,):
                if one.chunk.sequence.state is not ended:
                    progress.append(self._process_result(one, now))
        return progress

    # The rest is how.

    def _decode(
        self, step: StepBudget, sequences: SequenceOf[Sequence], order: SequenceOf[Sequence]
    ) -> None:
        """Plan a token of each that decodes, taking pages from the last of `order` if need be."""
        if self.modes is not None:
            sequences = list(filter(self.modes.joins, sequences))
        grow, running = self._pages.grow, SequenceState.RUNNING
        tenants: list[str] = []  # one for each token
        for sequence in sequences:
            if (
                sequence.state is running
                and sequence.num_remaining == 1
                and (grow(sequence) or self._make_room(sequence, order))
            ):
                step.schedule(sequence)
                tenants.append(sequence.request.share.tenant)
        for tenant, tokens in collections.Counter(tenants).items():
            self._fair.charge(tenant, tokens)

    def _make_room(self, sequence: Sequence, order: SequenceOf[Sequence]) -> bool:
        """Preempt the last of `order` until a sequence without room can grow; False if it goes."""
        while True:
            last = next(s for s in reversed(order) if s.state is SequenceState.RUNNING)
            assert len(self._running) > 1, "one sequence alone always has pages enough"
            self._preempt(last)
            if last is sequence:
                return False
            if self._pages.grow(sequence):
                return True

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
        free_rows = self._running.num_free_rows if admitting else 0
        self._gate.hold(self._waiting, free_rows)
        self._fill_lines(step, now, admitting, tenants)

    def _fill_lines(
        self, step: StepBudget, now: float, admitting: bool, tenants: Container[str]
    ) -> None:
        late = self._gate.late(now)
        lines = prompts_by_tenant(self._running, self._waiting, late)
        if tenants:
            lines = {t: line for t, line in lines.items() if t in tenants}
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
            request_ids: set[str] = set()  # of several choices the first one computes the prompt
            for sequence in self._waiting.of(tenant):
                if not claims.may_run(tenant):
                    break
                request_id = sequence.request.request_id
                waits = sequence.num_in_flight or self._follows_sibling(sequence)
                if request_id in request_ids or waits or not self._gate.enter(sequence, now):
                    continue
                request_ids.add(request_id)
                pages = self._pages.num_pages(len(sequence.token_ids))
                for taken in claims.make_room(tenant, pages):
                    self._preempt(taken)

    def _process_result(self, result: SequenceResult, now: float) -> Progress:
        progress = take_in(result, now, self._eos)
        if progress.finish_reason is not None:
            self.finish(progress.sequence, progress.finish_reason)
        return progress
