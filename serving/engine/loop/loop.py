"""The engine's thread: plans, dispatches, reads one step late, and hands out what came of it.

Other threads put requests in with `submit`, which takes the lock and so fails at once when it
must, and leave aborts for the loop. The device is only ever touched by the loop.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from lora_jax.adapters.registry import AdapterEntry
from serving.api.request import EngineDead, FinishReason, Request, Sequence, SequenceState, StepPlan
from serving.engine.loop import failures
from serving.engine.loop.cold_programs import run_cold
from serving.engine.loop.live_request import LiveRequest
from serving.engine.loop.live_requests import LiveRequests
from serving.engine.loop.loop_parts import AbstractTurns, LoopParts
from serving.engine.loop.pacing import Pacer
from serving.engine.loop.registry_follower import RegistryFollower
from serving.scheduling.scheduler import Progress, SchedulerStats
from serving.steps.model_runner import HeldStep, InFlightStep

logger = logging.getLogger(__name__)

STALL_S = 60.0  # a loop that has not turned for so long is not alive
_LOADING_WAIT_S = 0.0002  # the threads that copy need Python's lock
_SETTLE_S = 0.002  # a caller with an answer runs first, and a next request within this time
_IDLE_WAIT_S = 1.0  # the registry is looked at so often while nothing runs
_BLOCKED_WAIT_S = 0.02  # while sequences wait for something that no step of ours will bring
_LATE_ROWS = 24  # the sampler takes 50 us a row: of fewer rows it ends before a plan would
_DEAD = "The engine has stopped; the request was not finished."


class _Planned(NamedTuple):
    """A step that has not been sent, and sequences that ended before it."""

    plan: StepPlan | None
    ended: list[Sequence]
    expired: list[Sequence]


class EngineLoop:
    """One thread over scheduler and device, from `start` to `close`."""

    def __init__(self, parts: LoopParts):
        self._parts = parts
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._woken = False
        self._aborts: list[Request] = []
        self._closing = False
        self.end: Future[Exception | None] = Future()  # what ended the loop; None: `close` did
        books = parts.scheduler, parts.residencies, parts.metrics, parts.finished
        follows = parts.registry, parts.compositions, parts.residencies, parts.metrics
        self._follower = RegistryFollower(*follows)
        self._live = LiveRequests(self._lock, *books, parts.traces)
        self._flying: InFlightStep | None = None
        self._planned: _Planned | None = None  # made while the step before waits for its masks
        self._failed: list[failures.Failure] = []  # by the masks of the step that flies
        self._untold: list[failures.Failure] = []  # whose callers do not know yet
        self._early: list[Progress] | None = None  # of a step that was read before the next went
        self._heartbeat_s = time.monotonic()
        self._num_dispatched = 0
        self._pacer = Pacer(time.monotonic)
        self._alone: tuple[InFlightStep | HeldStep | None, float] = None, 0.0  # see _take_turn
        self.num_steps = 0  # whose results have been read
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # For other threads.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; live requests end with an error that says they may be tried again."""
        with self._lock:
            self._closing = True
        self.wake()
        if self._thread.is_alive() and not self.is_this_thread:
            self._thread.join()

    def wake(self) -> None:
        """Make the loop look around if it sleeps."""
        with self._lock:
            self._ring()

    def follow(self, commands: Iterable[Any]) -> None:
        """Do what another process's loop tells until it says no more, in place of `start`."""
        for command in commands:
            self._parts.runner.follow(command)
        self._parts.drain()

    @property
    def is_alive(self) -> bool:
        """True if the thread runs and the loop has run within the last STALL_S seconds."""
        stalled = time.monotonic() - self._heartbeat_s > STALL_S
        return self._thread.is_alive() and not (self.end.done() or self._closing or stalled)

    @property
    def is_this_thread(self) -> bool:
        """True in the loop's own thread, as in calls of `on_output`."""
        return threading.current_thread() is self._thread

    def submit(
        self,
        request: Request,
        entry: AdapterEntry | None,
        make_live: Callable[[list[Sequence]], LiveRequest],
    ) -> None:
        """Queue a request; raises QueueFull, ValueError or EngineDead and then changes nothing."""
        with self._lock:
            if self.end.done() or self._closing:
                raise EngineDead(_DEAD)
            if request.request_id in self._live:
                raise ValueError(f"A request of the id {request.request_id[:64]!r} is running.")
            sequences = self._parts.scheduler.add(request)
            self._pacer.asked(request.share.tenant)
            self._live.add(make_live(sequences))
            if entry is not None:
                self._parts.residencies.retain(entry)
            self._ring()

    def abort(self, request_id: str) -> None:
        """End a request soon; unknown ones are ignored, and later ones of the same id go on."""
        with self._lock:
            if (request := self._live.find(request_id)) is not None:
                self._aborts.append(request)
                self._ring()

    def _ring(self) -> None:
        """Wake the loop, wherever it waits; under the lock."""
        self._woken = True
        self._wake.notify()
        if self._parts.turns is not None:
            self._parts.turns.look()

    def scheduler_stats(self) -> SchedulerStats:
        """Return where the sequences are."""
        with self._lock:
            return self._parts.scheduler.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other; for an idle engine."""
        with self._lock:
            self._live.check_integrity()
            assert not self._parts.scheduler.has_work, "the scheduler has work"
            self._parts.scheduler.check_integrity()
            self._parts.residencies.check_integrity()

    # The loop.

    def _run(self) -> None:
        self._parts.compilations.watch_this_thread()
        why = None
        try:
            while not self._closing:
                self._iterate()
        except Exception as error:
            logger.exception("The engine has died.")
            why = error
        finally:
            self._parts.compilations.ignore_this_thread()
            with self._lock:
                self.end.set_result(why)
            self._live.close(_DEAD)
            self._parts.metrics.settle()
            self._parts.drain()
            self._flying, self._alone = None, (None, 0.0)  # whose results lie on the device

    def _iterate(self) -> None:
        """Plan and dispatch one step, take in the step before, and advance loads."""
        self._read_draft_results()
        if self._planned is None:
            self._wait_to_plan()
        now = time.monotonic()
        self._heartbeat_s = now
        planned, self._planned = self._planned or self._plan(now), None
        step = self._send(planned.plan, now)
        early, self._early = self._early, None
        finished, self._flying = self._flying, None
        is_idle = finished is None and early is None and step is None
        progress = early if finished is None else self._read_results(finished)
        if isinstance(step, InFlightStep) and step.waits:
            # Before anything for which the driver may wait for the device.
            self._post_masks(step.plan, step.first_samples, step.number)
        self._tell(planned)
        if isinstance(step, HeldStep):  # the device waits for it, callers wait for their tokens
            step, progress = self._sample(step, progress or []), None
        if progress is not None:
            self._hand_out(progress)
        # Behind what callers and masks wait for, beside the step that has been sent.
        loaded = self._advance_loads(step)
        if step is not None:
            self._parts.metrics.settle()
        if (is_idle or self._has_ended(step)) and not loaded:
            self._sleep()
        self._flying = step
        if step is not None and step.plan.is_short:  # its caller waits for it alone
            self._flying = None
            self._process_results(step)

    def _has_ended(self, step: InFlightStep | HeldStep | None) -> bool:
        """Return whether nothing is left to plan: a plan more would keep callers from their answer.

        Whoever asks meanwhile rings, and then the loop does not sleep.
        """
        return step is None and self._planned is None and not self._parts.scheduler.has_work

    def _wait_to_plan(self) -> None:
        """Return when the next step is due to be planned."""
        if self._flying is not None:
            # Its masks took a core from the step; the plan runs beside its sampler, on a free one.
            late = self._flying.waits and len(self._flying.plan.chunks) >= _LATE_ROWS
            late = late and self._parts.grammars.masks.on_few_cores
            wait_s = self._pacer.wait_s(self._flying.plan.num_tokens, late=late)
            if wait_s > 0:  # even a sleep of nothing hands the interpreter to other threads
                time.sleep(wait_s)
        if self._parts.turns is not None:
            self._take_turn(self._parts.turns)

    def _plan(self, now: float) -> "_Planned":
        """Plan the next step, and end what was aborted or has waited too long."""
        scheduler = self._parts.scheduler
        with self._lock:
            aborts, self._aborts, self._woken = self._aborts, [], False
            self._follower.follow()
            ids = [r.request_id for r in aborts if self._live.find(r.request_id) is r]
            ended = [s for request_id in ids for s in scheduler.abort(request_id)]
            expired = scheduler.expired(now)
            return _Planned(scheduler.plan(now), ended, expired)

    def _send(self, plan: StepPlan | None, now: float) -> InFlightStep | HeldStep | None:
        """Dispatch a step, its forward part where a grammar binds a row."""
        if plan is None:
            return None
        runner = self._parts.runner
        self._parts.residencies.prepare(runner, self._num_dispatched)
        is_two = plan.is_bound and runner.board is None  # programs
        step = runner.forward(plan) if is_two else runner.dispatch(plan, self._post_masks_first)
        self._num_dispatched += 1
        if self._flying is None:
            self._alone = step, now
        if self._parts.turns is not None:
            self._parts.turns.dispatched()
        self._pacer.dispatched(now, follows=self._flying is not None)
        return step

    def _tell(self, planned: "_Planned") -> None:
        """Tell callers what was known before the step; memory of their adapters may be freed."""
        for sequence in planned.ended:
            self._live.end(sequence, FinishReason.ABORT)
        for sequence in planned.expired:
            message = failures.ADAPTER_WAIT.format(name=sequence.request.adapter)
            self._live.end(sequence, FinishReason.ERROR, message, retryable=True, of_server=True)

    def _fail(self, failed: Iterable[failures.Failure]) -> None:
        """End sequences, of which callers are told with the next tokens; under the lock."""
        for one in failed:
            if one.sequence.state is not SequenceState.FINISHED:
                self._parts.scheduler.finish(one.sequence, FinishReason.ERROR)
                self._untold.append(one)

    def _take_turn(self, turns: AbstractTurns) -> None:
        """Give the device to another process where that is due, and have it for the next step."""
        if turns.is_due:
            step, self._flying = self._flying, None
            early, self._early = self._early, None
            if step is not None and not step.waits:  # for masks, which the host makes
                turns.pass_on()
            progress = (early or []) if step is None else self._read_results(step)
            turns.give_back()  # whose next holder need not wait for our callers
            self._hand_out(progress)
        with self._lock:
            has_work = self._parts.scheduler.has_work
        if has_work:
            turns.take(self._waiting_since, lambda: self._closing)

    def _waiting_since(self) -> list[float]:
        with self._lock:
            return self._parts.scheduler.waiting_since()

    def _post_masks(self, plan: StepPlan, first_samples: list[int], number: int) -> None:
        """Have the masks made that a step reads from the board, and post them."""
        row_masks, board = self._parts.grammars.masks, self._parts.runner.board
        assert board is not None, "a step reads masks from a board that is not there"
        row_masks.settle()
        masks = board.new_masks()
        told = functools.partial(board.post, number)  # the next step may be out by then
        given = masks.words, masks.row_to_mask
        self._failed = row_masks.post(plan, first_samples, *given, told)

    def _post_masks_first(self, plan: StepPlan, first_samples: list[int], number: int) -> None:
        """Read the step before and make the masks of a step that may not wait on the device."""
        finished, self._flying = self._flying, None
        if finished is not None:
            self._early = self._read_results(finished)
        self._post_masks(plan, first_samples, number)
        self._parts.grammars.masks.settle()

    def _sample(self, held: HeldStep, progress: list[Progress]) -> InFlightStep:
        """Send the rest of a step, masked by the tokens taken in, which callers get meanwhile.

        While the masks are made, the next step is planned: after the callers have their tokens,
        as a stop string ends a sequence and takes its row away, and no plan may hold it then.
        """
        row_masks, masks = self._parts.grammars.masks, self._parts.runner.new_masks()
        filling = row_masks.start(held.plan, held.first_samples, masks.words)
        self._hand_out(progress)
        # The device is idle from the end of this step to the next one's dispatch.
        settled = not (held.plan.is_short or held.plan.has_drafts)
        if self._parts.turns is None and settled and not self._pacer.waits:
            made = self._plan(time.monotonic())
            self._planned = made if made.plan or made.ended or made.expired else None
        self._failed = row_masks.finish(filling, masks.row_to_mask)
        return self._parts.runner.sample(held, masks)

    def _advance_loads(self, step: InFlightStep | HeldStep | None) -> bool:
        """Return whether the last load under way has ended, for which a sequence may wait."""
        residencies, runner = self._parts.residencies, self._parts.runner
        if not residencies.is_busy:
            return False
        count, steps = self._parts.chunks_per_step, (self._num_dispatched, self.num_steps)
        runs = step.runs if isinstance(step, InFlightStep) else lambda: True
        for digest, why in residencies.advance(runner, count, *steps, runs):
            with self._lock:
                waiting = self._parts.scheduler.waiting_for(digest)
                for sequence in waiting:
                    self._parts.scheduler.finish(sequence, FinishReason.ERROR)
            for sequence in waiting:
                message = failures.ADAPTER_LOAD.format(name=sequence.request.adapter, why=why)
                self._live.end(sequence, FinishReason.ERROR, message, retryable=True)
        return not residencies.is_busy

    def _sleep(self) -> None:
        """Wait until something is to be done."""
        if (turns := self._parts.turns) is not None:
            turns.give_back()
        loading, cold = self._parts.residencies.is_busy, False
        if not loading and not self._parts.scheduler.has_work:
            self._parts.residencies.rest()
            cold = run_cold(self._parts.runner, turns, lambda: self._woken or self._closing)
        with self._lock:
            blocked = cold or self._parts.scheduler.has_work
            waits = _LOADING_WAIT_S if loading else _BLOCKED_WAIT_S if blocked else _IDLE_WAIT_S
            if self._parts.metrics.has_notes:
                waits = min(waits, _SETTLE_S)
            rang = self._woken or self._closing or self._wake.wait(waits)
        if not rang:
            self._parts.metrics.settle()

    def _process_results(self, step: InFlightStep) -> None:
        """Read a step's results and hand out what they mean."""
        self._hand_out(self._read_results(step))

    def _read_draft_results(self) -> None:
        """Read the step that runs if the next one's positions follow from its results."""
        if self._flying is not None and self._flying.plan.has_drafts:
            step, self._flying = self._flying, None
            self._early = self._read_results(step)

    def _read_results(self, step: InFlightStep) -> list[Progress]:
        """Read a step's results; return what it gave, not handed out yet."""
        began = time.monotonic()
        results = self._parts.runner.read(step)
        self._pacer.ended(step.plan.num_tokens, began)
        if self._parts.turns is not None and self._alone[0] is step:
            prompts = sum(c.sequence.num_prompt == c.start + c.num_tokens for c in step.plan.chunks)
            self._parts.turns.ran(prompts, self._alone[1], time.monotonic())
        failed, self._failed = self._failed, []
        status = step.remote_status
        if step.plan.is_bound and self._parts.runner.was_late(step):
            failed = failures.of_late_masks(step.plan)
        lost = None if status is None else self._parts.residencies.affected_by(status)
        with self._lock:  # before a token counts as the sequence's next
            self._fail(failed)
            if lost:
                books = self._parts.scheduler, self._parts.residencies
                self._untold += failures.of_lost_server(*books, lost)
            self._fail(failures.of_bad_logits(results))
            progress = self._parts.scheduler.complete(step.plan, results, time.monotonic())
        self.num_steps += 1
        self._parts.metrics.step_done(step.plan.num_tokens)
        return progress

    def _hand_out(self, progress: list[Progress]) -> None:
        """Tell callers what failed, and give the others their tokens."""
        untold, self._untold = self._untold, []
        for one in untold:
            self._live.end(one.sequence, FinishReason.ERROR, one.why, **one.flags)
        num_generated, now = 0, time.monotonic()
        for one in progress:
            num_generated += one.result.token_id is not None
            self._live.deliver(one, now)
        self._parts.metrics.tokens_generated(num_generated)
