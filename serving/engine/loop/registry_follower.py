"""Changes of a registry, passed on to residencies and metrics between two steps.

Only names that have changed are passed on: where thousands are known, each adapter that is read
again would otherwise take the engine's thread milliseconds.
"""

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.registry import AdapterRegistry
from serving.engine.metrics.metrics import EngineMetrics
from serving.loading.compositions import Compositions
from serving.loading.residencies import Residencies


class RegistryFollower:
    """Keeps residencies and metrics at the state of a registry; the engine's thread uses it."""

    def __init__(
        self,
        registry: AdapterRegistry,
        compositions: Compositions | None,
        residencies: Residencies,
        metrics: EngineMetrics,
    ):
        self._registry, self._compositions = registry, compositions
        self._residencies, self._metrics = residencies, metrics
        self._seen: tuple[int, int] = -1, -1  # generations
        self._composed: dict[str, AdapterEntry] = {}  # by digest, as they were told

    def follow(self) -> None:
        """Tell what has changed since the last call."""
        composed = 0 if self._compositions is None else self._compositions.generation
        seen = self._registry.generation, composed  # before the look: what comes then is seen twice
        if seen == self._seen:
            return
        self._seen = seen
        changes: list[tuple[str, AdapterEntry | None]] = []
        for name, known in self._registry.take_changes():
            changes.append((name, known if isinstance(known, AdapterEntry) else None))
            if known is None:
                self._metrics.remove_adapter(name)
            else:
                self._metrics.add_adapter(name)
        self._residencies.follow(changes + self._composed_changes())

    def _composed_changes(self) -> list[tuple[str, AdapterEntry | None]]:
        """Return the compositions that came and went, by digest: names of two may be equal."""
        if self._compositions is None or not (self._compositions.entries() or self._composed):
            return []
        self._compositions.keep_only(self._registry.knows_digest)
        before, self._composed = (
            self._composed,
            {entry.digest: entry for entry in self._compositions.entries()},
        )
        gone = before.keys() - self._composed.keys()
        new = self._composed.keys() - before.keys()
        return [*((d, None) for d in gone), *((d, self._composed[d]) for d in new)]
