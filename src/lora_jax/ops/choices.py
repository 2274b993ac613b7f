"""Records which implementation served each op of this process, and why others did not."""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Choice:
    """An outcome of dispatch: the implementation, and the reasons of those that declined first."""

    implementation: str
    declined: Mapping[str, str]

    @property
    def key(self) -> tuple:
        """The outcome as a value that can be looked up."""
        return self.implementation, tuple(self.declined.items())


class Choices:
    """Outcomes by op, each once; safe for several tracing threads."""

    LIMIT = 32  # outcomes of one op: reasons name shapes, of which there may be many

    def __init__(self):
        self._lock = threading.Lock()
        self._by_op: dict[str, dict[tuple, Choice]] = {}

    def add(self, op: str, choice: Choice) -> bool:
        """Record an outcome; return whether it is new for this op."""
        with self._lock:
            choices = self._by_op.setdefault(op, {})
            if choice.key in choices or len(choices) >= self.LIMIT:
                return False
            choices[choice.key] = choice
            return True

    def table(self) -> dict[str, list[dict[str, Any]]]:
        """Return all outcomes, in the order of their first use."""
        with self._lock:
            return {
                op: [dataclasses.asdict(choice) for choice in choices.values()]
                for op, choices in sorted(self._by_op.items())
            }
