"""TPOT model of a LoRA Server (InfiniLoRA, section 4.2.2). No jax."""

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """Seconds that a server spends on one layer of one LLM instance's batch (Eq. 5)."""

    receive: float
    lora: float
    send: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must be seconds, 0 or more, got {value}.")

    @property
    def total(self) -> float:
        """T_recv + T_comp + T_send: what one instance waits for, left side of Eq. 5."""
        return self.receive + self.lora + self.send

    @property
    def slowest(self) -> float:
        """max(T_recv, T_comp, T_send): how often a pipelined server can start, as in Eq. 6."""
        return max(self.receive, self.lora, self.send)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times at one degree of expert parallelism and one per-instance batch size B."""

    ep: int
    batch: int
    times: LayerTimes


class Profile:
    """Measured times as a function of x and the batch size."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._of: dict[int, dict[int, LayerTimes]] = {}
        for one in measurements:
            if one.batch in self._of.setdefault(one.ep, {}):
                raise ValueError(f"There are two measurements of ep={one.ep}, batch={one.batch}.")
            self._of[one.ep][one.batch] = one.times
        if not self._of:
            raise ValueError("A profile needs at least one measurement.")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The x that were measured, ascending."""
        return tuple(sorted(self._of))

    def times(self, ep: int, batch: float) -> LayerTimes:
        """Return the times at a batch size: between two measured ones on the line between them.

        Below the smallest measured batch its times are taken, which are too long rather than too
        short. Raises ValueError above the largest, and for an x that was not measured.
        """
        if ep not in self._of:
            raise ValueError(f"ep={ep} was not measured; measured are {self.degrees}.")
        sizes = sorted(self._of[ep])
        if batch > sizes[-1]:
            raise ValueError(
                f"A batch of {batch:.0f} per instance is above the largest measured one of "
                f"ep={ep}, {sizes[-1]}; measure larger batches or use more instances."
            )
        rows = [dataclasses.astuple(self._of[ep][size]) for size in sizes]
        columns = zip(*rows, strict=True)
        return LayerTimes(*(float(np.interp(batch, sizes, column)) for column in columns))


@dataclasses.dataclass(frozen=True)
class LayerBudget:
    """Seconds that a layer may take: SLO_Layer, and of it SLO_FFN for the experts (Eq. 5, 6)."""

    layer: float
    ffn: float


def layer_budget(tpot: float, layers: int, attention: float, moe: float) -> LayerBudget:
    """Return the budgets of one layer from the average TPOT.

    The paper does not say how SLO_FFN follows from the TPOT. Here every layer gets the same part
    of it, and the experts get what attention leaves of that; the LoRA Server works while the base
    model's experts do, so that both must be done in this time. `attention` and `moe` are the
    measured seconds of a layer of the base model. Raises ValueError if the base model alone is
    too slow.
    """
    layer = tpot / layers
    if attention + moe > layer:
        raise ValueError(
            f"The base model alone needs {1e6 * (attention + moe):.0f} us per layer, and a TPOT of "
            f"{tpot} s leaves {1e6 * layer:.0f}; use smaller batches (more instances), faster "
            "instances or a longer TPOT."
        )
    return LayerBudget(layer=layer, ffn=layer - attention)


def meets_latency(times: LayerTimes, budget: LayerBudget) -> bool:
    """Return T_recv + T_comp + T_send <= SLO_FFN (Eq. 5)."""
    return times.total <= budget.ffn


def meets_throughput(times: LayerTimes, instances: int, budget: LayerBudget) -> bool:
    """Return max(T_recv, T_comp, T_send) * L <= SLO_Layer (Eq. 6).

    As written it does not depend on the number of stages y. It assumes that all L instances ask
    the same stage within the time of one layer; instances spread over the stages would allow y
    times as many (appendix A.2.1 says why deep pipelines do not reach that).
    """
    return times.slowest * instances <= budget.layer
