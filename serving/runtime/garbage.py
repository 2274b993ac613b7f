"""Python's garbage collector in a server: seldom, and not over what a start has made.

A start leaves some 350,000 objects that stay (jax, programs, routes), and a step makes a few
thousand that go by themselves. By default the collector looks through the latter twice a step, and
now and then through all, while every thread stands still: 0.3 s at a time.
"""

import contextlib
import gc
from collections.abc import Iterator

_YOUNG = 10_000  # objects more than before, until the youngest are looked through (Python: 700)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect nothing meanwhile: for traces of programs, whose many objects nearly all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect once, then seldom, and never what is there now; at the end all is as before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(_YOUNG, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
