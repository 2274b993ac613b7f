"""Calls that a function makes to itself before it has any, so that its first one is not the first.

A forked process copies each page that it first writes; routes, templates and programs do some work
once. A function that was started ahead of its calls has done all this when they come. The counters
of requests are set back. The prefix cache keeps the words of a chat template at most.
"""

import logging
import time
from typing import Any

from serving.api.sampling import Sampling

logger = logging.getLogger(__name__)

QUIET_S = 0.2  # after the start, without a call: one that waited for the start has come by then
PROMPT = "a"
_ROUNDS = 2  # the second one finds what the first one made
_COUNTED_S = 1.0  # until the engine's thread has counted requests that were answered
_SAMPLING = Sampling(temperature=0, max_tokens=2, ignore_eos=True)


def rehearse(engine: Any, adapter: str | None, http: Any = None) -> None:
    """Answer a few short calls on this thread, while no other call is under way.

    `http` is the function's `HttpSide`. A call that fails is one that the adapter does not take,
    such as text from one with a task head alone: nothing is raised.
    """
    begin, answered = time.monotonic(), 0
    for _ in range(_ROUNDS):
        try:
            answered += len(engine.generate([PROMPT], adapter, _SAMPLING))
            answered += 0 if http is None else http.rehearse(adapter, PROMPT)
        except Exception as error:  # whatever it is, callers are told of theirs
            logger.debug("A rehearsal failed: %s", error)
    while engine.metrics.requests_done < answered and time.monotonic() < begin + _COUNTED_S:
        time.sleep(0.001)
    engine.metrics.forget_requests()
    logger.debug("Rehearsed for %.3f s.", time.monotonic() - begin)
