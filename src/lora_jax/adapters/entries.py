"""Entries of the adapter registry by name, and their limits. No jax."""

import dataclasses

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AnyWeights


@dataclasses.dataclass(frozen=True)
class RegistryLimits:
    """Limits of the registry. Violations are AdapterRejected naming the limit."""

    max_adapters: int = 4096  # names, those without their weights in memory included
    max_total_bytes: int = 8 << 30  # weights on the host; beyond it unused ones are evicted
    max_in_memory: int | None = None  # adapters whose weights are on the host; None: no limit
    max_file_bytes: int = 4 << 30
    max_rank: int = 512
    loads_per_minute: int = 600


@dataclasses.dataclass(frozen=True, eq=False)
class PairWeights:
    """A LoRA adapter and an ESFT adapter that serve one request together."""

    lora: "AdapterEntry"
    esft: "AdapterEntry"
    report: AdapterReport

    @property
    def digest(self) -> str:
        return self.report.digest


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterEntry:
    """One loaded adapter. `generation` grows with every publish and unload of the registry."""

    name: str
    kind: AdapterKind
    digest: str
    generation: int
    weights: AnyWeights | PairWeights
    pinned: bool
    path: str  # relative to the adapter directory, or the operator's folder without its directory
    folder: str = ""  # where the files are, in full; never shown to clients
    confined: bool = False  # the folder must lie in the adapter directory
    explicit: bool = True  # loaded by the operator or an admin, not because a caller named it
    owner: str = ""  # the caller whose limit of host memory counts it

    @property
    def report(self) -> AdapterReport:
        """The report of what was read of its folder."""
        return self.weights.report

    def evicted(self, generation: int) -> "EvictedAdapter":
        """Return what stays of the entry when its weights go."""
        kept = ("name", "kind", "digest", "report", "path", "folder", "confined", "explicit")
        values = {field: getattr(self, field) for field in kept}
        return EvictedAdapter(generation=generation, **values)


@dataclasses.dataclass(frozen=True, eq=False)
class EvictedAdapter:
    """A name whose weights are not in memory: what is needed to read the same ones again."""

    name: str
    kind: AdapterKind
    digest: str
    generation: int
    report: AdapterReport
    path: str
    folder: str
    confined: bool
    explicit: bool
    pinned: bool = False
