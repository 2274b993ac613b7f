"""Live sequences of the scheduler: they come, wait, run and end. No jax, no strings.

What a sequence holds (a row, pages, an adapter slot, a place in its tenant's share) is taken and
given back here, so that queues and books agree after every call.
"""

import collections
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from serving.api.request import FinishReason, Request, Sequence, SequenceState
from serving.scheduling.adapter_gate import AdapterGate, AdapterResidency, NoAdapters
from serving.scheduling.entry_checks import check_fits, check_room
from serving.scheduling.fair_share import FairShares
from serving.scheduling.integrity import check_queues
from serving.scheduling.merge_modes import MergeModes
from serving.scheduling.new_sequences import new_sequences
from serving.scheduling.pages.extents import PageExtents
from serving.scheduling.pages.prefix_cache import PageCache
from serving.scheduling.pages.sequence_pages import SequencePages
from serving.scheduling.running_line import RunningLine
from serving.scheduling.slot_claims import SlotClaims
from serving.scheduling.speculation import Speculation
from serving.scheduling.stats import SchedulerStats, scheduler_stats
from serving.scheduling.step_budget import SchedulerLimits
from serving.scheduling.waiting_line import WaitingLine


class LiveSequences:
    """Every live sequence, in the waiting or in the running line, with what it holds."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        adapters: AdapterResidency | None = None,
        eos_token_ids: SequenceOf[int] = (),
        seed: int = 0,
        modes: MergeModes | None = None,
        speculation: Speculation | None = None,
        extents: Callable[[PageCache], PageExtents] | None = None,
    ):
        """`seed` is where requests without a seed get theirs. With `extents` KV pages have memory
        only while they need it.
        """
        self.limits, self.modes, self._speculation = limits, modes, speculation
        residency = adapters or NoAdapters()
        self._gate = AdapterGate(residency, limits.adapter_wait_s)
        self._eos = frozenset(eos_token_ids)
        self._random = random.Random(seed)
        rows, host = limits.num_encoder_rows, limits.num_host_pages
        sizes = limits.num_pages, limits.page_size, rows, host
        options = {"enable_prefix_caching": limits.enable_prefix_caching, "extents": extents}
        self._pages = SequencePages(*sizes, **options)
        self._waiting = WaitingLine()
        self._running = RunningLine(limits.max_num_seqs)
        self._fair = FairShares()
        self._slot_claims = SlotClaims(self._fair, self._gate, residency)
        self._requests: dict[str, list[Sequence]] = {}  # live sequences
        self._num_added = 0
        self._num_preemptions = 0

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
        late = self._gate.expired(now)
        return self._finish_all(late, FinishReason.ERROR) if late else late

    def waiting_for(self, digest: str) -> list[Sequence]:
        """Return the waiting sequences of an adapter, e.g. to fail them when it cannot load."""
        return [s for s in self._waiting if s.request.adapter_digest == digest]

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

    def waiting_since(self) -> list[float]:
        """Return the arrival times of the requests that wait, in order, as far as rows are free."""
        waiting = {s.request.request_id: s.request.arrival_s for s in self._waiting}
        return sorted(waiting.values())[: self._running.num_free_rows]

    @property
    def has_work(self) -> bool:
        """True if any sequence is waiting or running."""
        return bool(self._waiting or self._running)

    def remember_prefixes(self, wanted: bool) -> None:
        """Let prompts find pages of earlier ones, where the limits say so; not while not `wanted`.

        Any thread may say it. Pages that were remembered stay.
        """
        self._pages.remember(wanted)

    def stats(self) -> SchedulerStats:
        """Return where the sequences are."""
        counts = self._gate, self._pages, self._num_preemptions
        return scheduler_stats(self._running, self._waiting, *counts)

    def check_integrity(self) -> None:
        """Raise AssertionError when rows, pages, slots or queues contradict each other."""
        check_queues(self._running, self._waiting, self._requests)
        running = list(self._running)
        live = [*self._waiting, *running]
        tenants = (collections.Counter(s.tenant for s in queue) for queue in (live, running))
        self._fair.check_integrity(*tenants)
        self._pages.check_integrity(live, running)
        self._gate.check_integrity([*running, *(s for s in self._waiting if s.slot >= 0)])
        if self.modes is not None:
            self.modes.check_integrity(live)

    # For the planner of steps.

    def _finish_all(self, sequences: SequenceOf[Sequence], reason: FinishReason) -> list[Sequence]:
        ended = list(sequences)
        for sequence in ended:
            self.finish(sequence, reason)
        return ended

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

    def _start_running(self, sequence: Sequence, now: float) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        self._fair.start(sequence.tenant)
        sequence.state = SequenceState.RUNNING
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now

    def _follows_sibling(self, sequence: Sequence) -> bool:
        if not sequence.index:  # the first one computes the prompt
            return False
        return self._pages.follows(sequence, self._requests[sequence.request.request_id])
