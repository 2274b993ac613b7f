"""Logging as it was before a test; a server configures it for the whole process."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def kept_logging() -> Iterator[None]:
    """Set back handlers, levels and filters, which `serving.engine.metrics.logs.configure` sets.

    A handler that stays writes to the output of a test that has ended, which is closed.
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
