"""Durations and sizes that the simulator takes as given, in seconds and GB.

The defaults are assumptions for one 48 GB card, not measured by this project; `bench.functions
--measure` writes those of this machine. Each says its source: "5"
is a section of ServerlessLoRA (arXiv 2505.14468), "own" was chosen so that a cold start has the
order of its figure 1. `--times FILE` replaces any of them.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from serving.functions.policies.batching import PrefillTime


@dataclasses.dataclass(frozen=True)
class Model:
    """A backbone and what one function over it needs."""

    name: str
    backbone_gb: float
    prefill: PrefillTime  # 5.10: SLO is 5 x the first warm TTFT
    slo_s: float  # 5.10
    decode_step_s: float  # table 3: 2.4 s for 100 tokens
    kv_gb: float  # of one request
    largest_batch: int


@dataclasses.dataclass(frozen=True)
class Times:
    """All that the simulator is given."""

    models: tuple[Model, ...] = (
        Model("7b", 13.5, PrefillTime(0.5, 0.03), 2.5, 0.024, 0.08, 32),
        Model("13b", 26.0, PrefillTime(0.8, 0.05), 4.0, 0.024, 0.13, 32),
    )
    answer_tokens: int = 100  # figure 1
    libraries_s: float = 3.0  # own
    libraries_gb: float = 1.5  # own
    fork_s: float = 0.02  # measured on a CPU: a fork of a process that has imported everything
    context_s: float = 1.5  # own: context, kernels and programs
    context_gb: float = 0.473  # 5.13
    adapter_gb: float = 0.1  # own
    storage_gb_per_s: float = 2.0  # own
    host_gb_per_s: float = 12.0  # own: ServerlessLLM's loader from host memory
    device_gb: float = 48.0  # 5.1: L40S
    devices_per_model: int = 2  # own: copies of a shared backbone; private weights have one each
    host_gb: float = 128.0  # own: idle container memory for pre-loading
    keep_alive_s: float = 60.0  # own: an artifact that no plan wants stays so long after its use

    def load_s(self, gb: float, in_host: bool) -> float:
        """Return the seconds that bring so many GB to the device."""
        return gb / (self.host_gb_per_s if in_host else self.storage_gb_per_s)


def read_times(path: Path | None) -> Times:
    """Return the assumptions, with what a JSON file says instead. ValueError: an unknown field."""
    if path is None:
        return Times()
    given = json.loads(path.read_text())
    given = given.get("measured", given.get("device", given))  # as the bench writes it
    given = given.get("times", given)
    try:
        return times_of(given)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def times_of(given: dict[str, Any]) -> Times:
    """Return the assumptions with these fields instead. ValueError: an unknown field."""
    unknown = given.keys() - {field.name for field in dataclasses.fields(Times)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} cannot be set.")
    if "models" in given:
        given = given | {"models": tuple(_model(**fields) for fields in given["models"])}
    return dataclasses.replace(Times(), **given)


def _model(prefill: dict[str, float], **fields: Any) -> Model:
    return Model(prefill=PrefillTime(**prefill), **fields)
