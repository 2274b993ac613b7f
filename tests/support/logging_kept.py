"""Settings of Python's logging that a server sets for its whole process, set back behind a test."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """Set back handlers, levels and filters, which `serving.engine.metrics.logs.configure` sets.

    A handler that outlives its test writes the lines of later ones to a stdout that is closed.
    """
    root, access = logging.getLogger(), logging.getLogger("serving.access")
    loggers = (root, *(logging.getLogger(name) for name in ("serving", "lora_jax", "uvicorn")))
    levels, handlers, filters = (
        [each.level for each in loggers],
        root.handlers[:],
        access.filters[:],
    )
    try:
        yield
    finally:
        root.handlers[:], access.filters[:] = handlers, filters
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
