"""A bounded wait for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, pause: float = 0.002) -> None:
    """Return once the condition holds; a test fails where it does not within `seconds`.

    60 s are for a machine that does other work: nothing that a test waits for takes long.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true within {seconds:g} s"
        time.sleep(pause)
