"""Router: chooses the LLM instance of a request. No jax.

Adapters go to instances by load, greedily (InfiniLoRA, section 6.1).
An adapter stays with one instance, where its attention part and its prefixes are, until the loads
of all adapters are looked at again. Requests of the base model go where least is under way.
A name is kept only once an instance has answered for it: anybody may send names that do not exist.
"""

import threading
from collections.abc import Iterable

from lora_jax.placement.assign import assign

_REPLAN = 256  # requests between two looks at the loads
_FADE = 0.5  # what a load counts at the next look
_MOST_NAMES = 8192  # adapters that have a home


class Router:
    """Counts what is under way on each instance; any thread may call it."""

    def __init__(self, instances: int, adapters: Iterable[str] = (), *, merged: str | None = None):
        """`adapters` are known from the start, and taken for equally busy. The last instance serves
        the one that is `merged`, and nothing else.
        """
        self._lock = threading.Lock()
        self._merged, self._shared = merged, instances - (merged is not None)
        self._under_way = [0] * instances
        self._is_up = [True] * instances
        self._lives = [0] * instances
        self._load_of = dict.fromkeys((a for a in adapters if a != merged), 1.0)
        self._instance_of = assign(self._load_of, self._shared)
        self._totals = self._sums()
        self._since = 0

    def choose(self, adapter: str | None, load: float = 1.0, avoid: Iterable[int] = ()) -> int:
        """Return the instance for a request and count it as under way; `done` ends that.

        `load` is any additive measure of the request. `adapter` None is the base model. Instances
        that are down, and those in `avoid`, are taken only when there are no others; a merged
        adapter's requests then go where it is not merged.
        """
        with self._lock:
            chosen = None if adapter is None else self._home_of(adapter, load)
            fit = [n for n, up in enumerate(self._is_up) if up and n not in set(avoid)]
            if adapter is None or adapter != self._merged:
                fit = [n for n in fit if n < self._shared]
            if chosen is None or (fit and chosen not in fit):
                totals = [0.0] * len(self._totals) if adapter is None else self._totals
                choices = fit or range(self._shared)
                chosen = min(choices, key=lambda n: (self._under_way[n], totals[n], n))
            self._under_way[chosen] += 1
            return chosen

    def answered(self, adapter: str, instance: int, load: float = 1.0) -> None:
        """The instance has answered for this adapter, which exists and gets its home there."""
        with self._lock:
            if adapter in self._instance_of or adapter == self._merged:
                return
            if len(self._instance_of) >= _MOST_NAMES:
                self._drop(min(self._load_of, key=self._load_of.__getitem__))
            self._load_of[adapter], self._instance_of[adapter] = load, instance
            self._totals[instance] += load

    def forget(self, adapter: str) -> None:
        """There is no such adapter any more."""
        with self._lock:
            if adapter in self._instance_of:
                self._drop(adapter)

    def done(self, instance: int) -> None:
        """A request of this instance has ended."""
        with self._lock:
            self._under_way[instance] -= 1

    def set_up(self, instance: int, up: bool) -> None:
        """Say whether an instance answers."""
        with self._lock:
            self._lives[instance] += up and not self._is_up[instance]
            self._is_up[instance] = up

    def life(self, instance: int) -> tuple[int, int]:
        """Return what tells an instance's process from the one that comes in its place."""
        with self._lock:
            return instance, self._lives[instance]

    @property
    def up(self) -> tuple[int, ...]:
        """Instances that answer."""
        with self._lock:
            return tuple(n for n, up in enumerate(self._is_up) if up)

    @property
    def instance_of(self) -> dict[str, int]:
        """The home of each adapter that has one."""
        with self._lock:
            return dict(self._instance_of)

    def _home_of(self, adapter: str, load: float) -> int | None:
        """Count a request of an adapter; return its home, None while it has none."""
        if adapter == self._merged:
            return self._shared
        if adapter not in self._instance_of:
            return None
        self._load_of[adapter] += load
        self._totals[self._instance_of[adapter]] += load
        self._since += 1
        if self._since >= _REPLAN:
            self._since = 0
            self._instance_of = assign(self._load_of, self._shared)
            self._load_of = {name: _FADE * load for name, load in self._load_of.items()}
            self._totals = self._sums()
        return self._instance_of[adapter]

    def _drop(self, adapter: str) -> None:
        self._totals[self._instance_of.pop(adapter)] -= self._load_of.pop(adapter)

    def _sums(self) -> list[float]:
        """Return the load of each instance's adapters."""
        totals = [0.0] * len(self._under_way)
        for name, instance in self._instance_of.items():
            totals[instance] += self._load_of[name]
        return totals
