"""Loads and unloads at run time, as several instances carry them out: all of them, or none.

Each instance records what it has done in one journal, before it answers. The journal decides: an
instance that did otherwise, or was not there, repeats it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from serving.adapters.journal import Changes, Journal

logger = logging.getLogger(__name__)


class Instance(Protocol):
    """An instance's process, as far as the journal is concerned."""

    number: int
    is_ready: bool

    def replay(self) -> dict[str, str]: ...


class AdapterChanges:
    """Applies one change at a time, under `lock`."""

    def __init__(self, journal: Journal | None, instances: Callable[[], Iterable[Instance]]):
        """Without a journal nothing is recorded, and nothing can be repeated."""
        self._journal, self._instances = journal, instances
        self.lock = threading.Lock()

    @property
    def are_recorded(self) -> bool:
        """True if there is a journal."""
        return self._journal is not None

    def read(self) -> Changes:
        """Return what is recorded."""
        return Changes() if self._journal is None else self._journal.read()

    def repeat(self, instance: Instance) -> dict[str, str]:
        """Let an instance that has just started catch up; return what it could not load."""
        return {} if self._journal is None else instance.replay()

    def agree(self, before: Changes) -> bool:
        """Bring all instances to what is recorded now; return whether they are there.

        Where one cannot follow, what was recorded `before` is put back, everywhere.
        """
        if self._journal is None:
            return True
        failures = self._repeat_everywhere()
        now = self._journal.read()
        failed = [name for name in failures if now.loaded.get(name) != before.loaded.get(name)]
        if not failed:
            return True
        for name in failed:
            logger.error("Adapter %s was unloaded again on all instances: %s", name, failures[name])
            self._journal.put_back(name, before)
        self._repeat_everywhere()
        return False

    def _repeat_everywhere(self) -> dict[str, str]:
        failures: dict[str, str] = {}
        for instance in self._instances():
            if not instance.is_ready:
                continue  # it repeats the journal before it gets a request
            try:
                failures |= instance.replay()
            except ConnectionError as error:
                logger.warning("%s", error)
        return failures
