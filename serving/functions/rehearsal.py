"""Calls that a function makes to itself before it has any, so that its first one is not the first.

A forked process copies each page that it first writes; routes, templates and programs do some work
once. A function that was started ahead of its calls has done all this when they come. The counters
of requests are set back, and no page of a rehearsal is found by a prompt.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

QUIET_S = 0.2  # after the start, without a call: one that waited for the start has come by then
SHORT = "a"
TEXT = "The text of a call that nobody has made."
# Tokens of prompts: for the programs of small steps, whatever the tokenizer makes of a text.
LENGTHS = 24, 100, 200
_ROUNDS = 2  # the second one finds what the first one made
_COUNTED_S = 1.0  # until the engine's thread has counted requests that were answered
SAMPLING = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}


def prompts_of(engine: Any) -> list[str | list[int]]:
    """Return a text of one step, and prompts of tokens for steps of several sizes."""
    ids = engine.tokenizer.encode(TEXT) or [0]
    room = engine.model_info.max_model_len - SAMPLING["max_tokens"]
    return [SHORT, *((ids * length)[:length] for length in LENGTHS if length <= room)]


def rehearse(
    engine: Any,
    ask: Callable[[str | list[int]], bool],
    http: Callable[[str], int],
    asked: Callable[[], bool],
) -> None:
    """Answer a few short calls, until `asked` says that one of a caller has come.

    `ask` answers a prompt as a caller's is and says whether it did, `http` those of routes and says
    how many it answered. A call that fails is one that the adapter does not take, such as text from
    one with a task head alone: nothing is raised. An engine that sends a trace for each request
    answers none.
    """
    if engine.config.otlp_traces_endpoint:
        return
    begin, answered = time.monotonic(), 0
    calls = [(http, SHORT), *((ask, prompt) for prompt in prompts_of(engine))]
    engine.remember_prefixes(False)
    try:
        for call, prompt in calls * _ROUNDS:
            if asked():
                break
            try:
                answered += call(prompt)
            except Exception as error:  # whatever it is, callers are told of theirs
                logger.debug("A rehearsal failed: %s", error)
    finally:
        engine.remember_prefixes(True)
    until = time.monotonic() + _COUNTED_S
    while engine.metrics.requests_done < answered and time.monotonic() < until:
        time.sleep(0.001)
    engine.metrics.forget_requests()
    logger.debug("Rehearsed for %.3f s.", time.monotonic() - begin)
