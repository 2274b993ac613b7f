"""Router: chooses the LLM instance of a request. No jax.

Adapters go to instances by load, greedily (InfiniLoRA, section 6.1).
An adapter stays with one instance, where its attention part and its prefixes are, until the loads
of all adapters are looked at again. Requests of the base model go where least is under way.
"""

import threading
from collections.abc import Iterable

from lora_jax.placement.assign import assign

_REPLAN = 256  # requests between two looks at the loads
_FADE = 0.5  # what a load counts at the next look


class Router:
    """Counts what is under way on each instance; any thread may call it."""

    def __init__(self, instances: int, adapters: Iterable[str] = ()):
        """`adapters` are known from the start, and taken for equally busy."""
        self._lock = threading.Lock()
        self._under_way = [0] * instances
        self._is_up = [True] * instances
        self._load_of = dict.fromkeys(adapters, 1.0)
        self._instance_of = assign(self._load_of, instances)
        self._since = 0

    def choose(self, adapter: str | None, load: float = 1.0, avoid: Iterable[int] = ()) -> int:
        """Return the instance for a request and count it as under way; `done` ends that.

        `load` is any additive measure of the request. `adapter` None is the base model. Instances
        that are down, and those in `avoid`, are taken only when there are no others.
        """
        with self._lock:
            chosen = None if adapter is None else self._home_of(adapter, load)
            fit = [n for n, up in enumerate(self._is_up) if up and n not in set(avoid)]
            if chosen is None or (fit and chosen not in fit):
                choices = fit or range(len(self._under_way))
                chosen = min(choices, key=lambda n: (self._under_way[n], n))
            self._under_way[chosen] += 1
            return chosen

    def done(self, instance: int) -> None:
        """A request of this instance has ended."""
        with self._lock:
            self._under_way[instance] -= 1

    def set_up(self, instance: int, up: bool) -> None:
        """Say whether an instance answers."""
        with self._lock:
            self._is_up[instance] = up

    @property
    def up(self) -> tuple[int, ...]:
        """Instances that answer."""
        with self._lock:
            return tuple(n for n, up in enumerate(self._is_up) if up)

    @property
    def instance_of(self) -> dict[str, int]:
        """The instance of each adapter seen so far."""
        with self._lock:
            return dict(self._instance_of)

    def _home_of(self, adapter: str, load: float) -> int:
        self._load_of[adapter] = self._load_of.get(adapter, 0.0) + load
        self._since += 1
        if self._since >= _REPLAN:
            self._since = 0
            self._instance_of = assign(self._load_of, len(self._under_way))
            self._load_of = {name: _FADE * load for name, load in self._load_of.items()}
        if adapter not in self._instance_of:
            self._instance_of[adapter] = self._least_loaded()
        return self._instance_of[adapter]

    def _least_loaded(self) -> int:
        totals = [[0.0, 0, n] for n in range(len(self._under_way))]
        for name, instance in self._instance_of.items():
            totals[instance][0] += self._load_of[name]
            totals[instance][1] += 1
        return int(min(totals)[2])
