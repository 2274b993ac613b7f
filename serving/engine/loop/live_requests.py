"""Requests between submit and their last delta: what a step gave reaches their callers.

A caller whose callback raises loses its own request and no other.
"""

import logging
import threading
import time

from serving.adapters.rollout_guard import Finished
from serving.api.request import FinishReason, Request, Sequence
from serving.engine.loop.live_request import LiveRequest
from serving.engine.metrics.metrics import EngineMetrics
from serving.engine.metrics.traces import Traces
from serving.loading.residencies import Residencies
from serving.scheduling.scheduler import Progress, Scheduler

logger = logging.getLogger(__name__)

_NO_OUTPUT = "The output of the request could not be processed."


class LiveRequests:
    """Live requests by id; the engine's thread uses it, other threads `in`, `find` and `add`.

    `lock` guards the scheduler and the requests: callers of `in`, `find`, `add` and
    `check_integrity` hold it, the other methods take it.
    """

    def __init__(
        self,
        lock: threading.Lock,
        scheduler: Scheduler,
        residencies: Residencies,
        metrics: EngineMetrics,
        finished: Finished,
        traces: Traces | None = None,
    ):
        """`finished` is told the adapter, the outcome and the digest of the files of each request
        that counts as one, `traces` every request.
        """
        self._traces = traces
        self._lock, self._scheduler, self._residencies = lock, scheduler, residencies
        self._metrics, self._finished = metrics, finished
        self._live: dict[str, LiveRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def find(self, request_id: str) -> Request | None:
        """Return the live request of an id."""
        live = self._live.get(request_id)
        return None if live is None else live.request

    def add(self, live: LiveRequest) -> None:
        """Keep a request until it ends."""
        self._live[live.request.request_id] = live

    def check_integrity(self) -> None:
        """Raise AssertionError if a request is live; for an idle engine."""
        assert not self._live, f"live requests {sorted(self._live)}"

    def deliver(self, progress: Progress, now: float) -> None:
        """Hand out what one sequence got; its own trouble ends its request and no other."""
        if (live := self._of(progress.sequence)) is None:
            return
        try:
            live.deliver(progress, now, self._ending)
        except Exception:
            logger.exception("Request %s failed.", live.request.request_id)
            self._fail(live, _NO_OUTPUT)
            return
        if live.done:
            self._retire(live, now)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        retryable: bool = False,
        bad_request: bool = False,
        of_server: bool = False,
    ) -> None:
        """Tell the caller that a sequence, already finished for the scheduler, has ended."""
        if (live := self._of(sequence)) is None:
            return
        if live.unfinished() == [sequence]:
            self._release(live)
        try:
            kind = {"retryable": retryable, "bad_request": bad_request, "of_server": of_server}
            live.end(sequence, reason, error, **kind)
        except Exception:
            logger.exception("Request %s failed.", live.request.request_id)
            self._fail(live, _NO_OUTPUT)
            return
        if live.done:
            self._retire(live, time.monotonic())

    def _of(self, sequence: Sequence) -> LiveRequest | None:
        """Return a sequence's request, None where it has ended: its id may be another's by now."""
        live = self._live.get(sequence.request.request_id)
        return live if live is not None and live.request is sequence.request else None

    def close(self, error: str) -> None:
        """End all requests with an error after which they may be tried again; never raises."""
        with self._lock:
            left, self._live = list(self._live.values()), {}
        for live in left:
            self._tell(live, error, retryable=True)

    def _fail(self, live: LiveRequest, error: str) -> None:
        """End what is left of a request with an error."""
        if live.unfinished():
            with self._lock:
                self._scheduler.abort(live.request.request_id)
        self._release(live)
        self._tell(live, error, retryable=False)
        self._retire(live, time.monotonic())

    def _tell(self, live: LiveRequest, error: str, *, retryable: bool) -> None:
        """Send the last deltas of a request; its callback may be what is broken."""
        for sequence in live.unfinished():
            try:
                live.end(sequence, FinishReason.ERROR, error, retryable=retryable)
            except Exception:
                logger.exception(
                    "The caller of request %s could not be notified.", live.request.request_id
                )

    def _ending(self, live: LiveRequest, sequence: Sequence, by_stop_string: bool) -> None:
        """A choice has ended, and its caller is told next."""
        if by_stop_string:
            with self._lock:
                self._scheduler.finish(sequence, FinishReason.STOP)
        if live.done:
            self._release(live)

    def _release(self, live: LiveRequest) -> None:
        """Forget a request, and what was kept for it; a second call does nothing.

        Before its caller has the last delta: who asks again then finds the id and the memory free.
        """
        request_id, digest = live.request.request_id, live.request.adapter_digest
        with self._lock:
            if self._live.get(request_id) is not live:  # the id may be another request's by now
                return
            del self._live[request_id]
            if digest:
                self._residencies.drop(digest)

    def _retire(self, live: LiveRequest, now: float) -> None:
        """Release a request that has ended, and have it counted soon."""
        self._release(live)
        self._metrics.later(self._count, live, now)

    def _count(self, live: LiveRequest, now: float) -> None:
        summary = live.summary(now)
        self._metrics.request_done(summary)
        if self._traces is not None:
            self._traces.ended(live.request, summary)
        outcome = summary.outcome()
        if outcome is not None:
            self._finished(summary.adapter, outcome, live.request.adapter_digest)
