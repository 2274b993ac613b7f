"""References to the objects that the engine's loop drives, made by `parts`."""

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from lora_jax.adapters.registry import AdapterRegistry
from serving.adapters.rollout_guard import Finished
from serving.engine.metrics.metrics import EngineMetrics
from serving.engine.metrics.traces import Traces
from serving.loading.compositions import Compositions
from serving.loading.residencies import Residencies
from serving.runtime.compile_counter import CompileCounter
from serving.scheduling.scheduler import Scheduler
from serving.steps.model_runner import ModelRunner
from serving.text.structured.grammars import Grammars

logger = logging.getLogger(__name__)


class AbstractTurns(Protocol):
    """Turns on a device that several processes share; the loop's thread uses it."""

    @property
    def is_due(self) -> bool:
        """True if the turn is to be given back or passed on before the next step."""
        ...

    def take(self, arrivals: Callable[[], SequenceOf[float]], closing: Callable[[], bool]) -> None:
        """Return when the device is this process's, or the loop is closing."""
        ...

    def take_idle(self, woken: Callable[[], bool]) -> bool:
        """Return True when the device is this process's because nobody wants it, False if `woken`
        says so first."""
        ...

    def look(self) -> None:
        """Make a `take` or `take_idle` under way look again; any thread may call this."""
        ...

    def dispatched(self) -> None:
        """Note that a step is on its way to the device."""
        ...

    def pass_on(self) -> None:
        """Let others' steps follow the one that runs; `give_back` is called when it was read."""
        ...

    def give_back(self) -> None:
        """Let others have the device, on which nothing of this process runs."""
        ...

    def close(self) -> None:
        """Take and keep no turn any more; nothing of this process runs on the device."""
        ...

    def ran(self, num_prompts: int, began: float, ended: float) -> None:
        """Note a step beside which no other of this process ran, with the ends of so many prompts.

        Times are those of time.monotonic.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LoopParts:
    """Parts that the loop drives."""

    runner: ModelRunner
    scheduler: Scheduler
    registry: AdapterRegistry
    residencies: Residencies
    metrics: EngineMetrics
    compilations: CompileCounter
    grammars: Grammars
    chunks_per_step: int
    finished: Finished = lambda adapter, outcome, digest: None
    compositions: Compositions | None = None
    traces: Traces | None = None
    turns: AbstractTurns | None = None

    def drain(self) -> None:
        """Wait for the device, so that the process may end while nothing runs; free its memory."""
        try:
            self.runner.wait()
        except Exception:
            logger.exception("The last step failed.")
        self.registry.line.close()
        parts = self.turns, self.residencies, self.grammars, self.traces, self.runner
        for part in parts:
            if part is not None:
                part.close()
