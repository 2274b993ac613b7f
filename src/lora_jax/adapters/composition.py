"""Composition of adapters into one: the weighted sum of what LoRAs add, and the union of experts.

The sum is that of PEFT's `add_weighted_adapter(..., combination_type="cat")`: ranks stand one after
the other, A is multiplied by weight and scaling, B stays. No jax.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lora_jax.adapters.entries import AdapterEntry, PairWeights
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.versions import split
from lora_jax.adapters.weights import (
    AdapterReport,
    AdapterWeights,
    ExpertWeights,
    ModuleReport,
    SiteWeights,
)
from lora_jax.rank_rows import scaled

MOST_PARTS = 4
MOST_WEIGHT = 100.0
_SCALED_B = "kv_b_proj.k"  # its B is the A of kv_b_proj.v


@dataclasses.dataclass(frozen=True)
class Part:
    """One adapter of a composition, by name."""

    name: str
    weight: float = 1.0


def parts_of(given: Any) -> tuple[Part, ...]:
    """Return the parts of a mapping from names to weights, or of a list of {"name", "weight"}.

    Raises ValueError naming what is wrong: 1 to MOST_PARTS parts, names once each, and weights that
    are finite numbers of at most MOST_WEIGHT but not 0.
    """
    if isinstance(given, Mapping):
        given = [{"name": name, "weight": weight} for name, weight in given.items()]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError("adapters must be a list of objects with name and weight.")
    if not 1 <= len(given) <= MOST_PARTS:
        raise ValueError(f"adapters must have 1 to {MOST_PARTS} parts, got {len(given)}.")
    parts = tuple(map(_part, given))
    names = [part.name for part in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"adapters names {twice[:80]!r} twice; add the weights up.")
    return parts


def _part(entry: Any) -> Part:
    if not isinstance(entry, Mapping):
        raise ValueError("each of adapters must be an object with name and weight.")
    unknown = next((str(key)[:64] for key in entry if key not in ("name", "weight")), None)
    if unknown is not None:
        raise ValueError(f"adapters has {unknown!r}; a part has name and weight.")
    name, weight = entry.get("name"), entry.get("weight", 1.0)
    if not isinstance(name, str) or not name:
        raise ValueError("each of adapters must have a name.")
    number = not isinstance(weight, bool) and isinstance(weight, int | float)
    if not number or not math.isfinite(weight) or not 0 < abs(weight) <= MOST_WEIGHT:
        raise ValueError(
            f"the weight of {name[:80]!r} must be a number other than 0 in [-{MOST_WEIGHT:g}, "
            f"{MOST_WEIGHT:g}], got {weight!r}."
        )
    return Part(name, float(weight))


def shown(parts: Iterable[tuple[str, float]]) -> str:
    """Return the parts as logs and answers have them: law*0.7+formal*0.5."""
    return "+".join(f"{name}*{weight:g}" for name, weight in parts)


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of the parts of what `shown` gave; a plain adapter's name has none."""
    return tuple(part.rpartition("*")[0] for part in text.split("+")) if "*" in text else ()


def versions_in(name: str) -> str | None:
    """Return the version of an adapter's full name: "v2" of "sql@v2"; None where it has none.

    Of a weighted sum, as `shown` names it, these are the full names of the parts that have
    versions, in their order: "sql@v2, formal@v1".
    """
    parts = names_in(name)
    versions = [part for part in parts if split(part)[1] is not None]
    return ", ".join(versions) or None if parts else split(name)[1]


def digest_of(parts: Iterable[tuple[str, float]]) -> str:
    """Return the digest of (digest, weight) pairs in this order."""
    text = "\n".join(f"{digest} {weight!r}" for digest, weight in parts)
    return hashlib.sha256(f"composition\n{text}".encode()).hexdigest()


def sum_of(
    parts: Sequence[tuple[AdapterWeights, float]], digest: str, name: str, max_rank: int
) -> AdapterWeights:
    """Return one adapter that adds sum_i weight_i * scaling_i * (x A_i^T) B_i, in float32.

    Raises ValueError where the ranks of a site sum to more than `max_rank`.
    """
    for weights, _ in parts:
        if weights.report.brings:
            raise ValueError(
                f"an adapter with {', '.join(weights.report.brings)} ({weights.report.folder}) is "
                "not composed with others; ask for it alone."
            )
    sites: dict[tuple[str, int], SiteWeights] = {}
    shared: dict[tuple, np.ndarray] = {}  # matrices that several sites have stay one

    def joined(matrices: list[np.ndarray], factors: list[tuple[float, float]]) -> np.ndarray:
        key = (*map(id, matrices), *factors)
        if key not in shared:
            shared[key] = _joined(matrices, factors)
        return shared[key]

    for module, layer in sorted({key for weights, _ in parts for key in weights.sites}):
        terms = [(w.sites[module, layer], f) for w, f in parts if (module, layer) in w.sites]
        rank = sum(site.rank for site, _ in terms)
        if rank > max_rank:
            raise ValueError(
                f"the ranks of {name[:200]!r} sum to {rank} at {module}; the server takes "
                f"max_lora_rank={max_rank}. Use fewer parts, or start it with a larger one."
            )
        scales = [(factor, site.scaling) for site, factor in terms]
        ones = [(1.0, 1.0)] * len(terms)
        a_scales, b_scales = (ones, scales) if module == _SCALED_B else (scales, ones)
        a = joined([site.a for site, _ in terms], a_scales)
        b = joined([site.b for site, _ in terms], b_scales)
        sites[module, layer] = SiteWeights(a, b, 1.0)
    return _with_report(sites, digest, name)


def _joined(matrices: list[np.ndarray], factors: list[tuple[float, float]]) -> np.ndarray:
    """Return the ranks one after the other, times weight and then scaling; see `scaled`."""
    experts = max(len(matrix) for matrix in matrices)
    rows = []
    for matrix, (weight, scaling) in zip(matrices, factors, strict=True):
        times = scaled(matrix, weight, scaling)
        rows.append(np.broadcast_to(times, (experts, *matrix.shape[1:])))
    return np.concatenate(rows, axis=1)


def _with_report(
    sites: dict[tuple[str, int], SiteWeights], digest: str, name: str
) -> AdapterWeights:
    modules = {}
    for module in sorted({module for module, _ in sites}):
        layers = tuple(sorted(layer for m, layer in sites if m == module))
        ranks = tuple(sorted({sites[module, layer].rank for layer in layers}))
        modules[module] = ModuleReport(layers, ranks, (1.0,))
    report = _report(AdapterKind.LORA, digest, name)
    weights = AdapterWeights(sites, report)
    size = sum(matrix.nbytes for matrix in weights.matrices())
    most = max(site.rank for site in sites.values())
    return AdapterWeights(
        sites, dataclasses.replace(report, modules=modules, weight_bytes=size, max_rank=most)
    )


def union_of(parts: Sequence[ExpertWeights], digest: str, name: str) -> ExpertWeights:
    """Return one ESFT adapter with the experts of all; ValueError where two have the same one."""
    experts: dict[int, dict[int, tuple[np.ndarray, ...]]] = {}
    for part in parts:
        for layer, of_layer in part.experts.items():
            replaced = experts.setdefault(layer, {})
            both = sorted(replaced.keys() & of_layer.keys())
            if both:
                raise ValueError(
                    f"{name[:200]!r} has two ESFT adapters that replace expert {both[0]} of layer "
                    f"{layer}; only one can."
                )
            replaced.update(of_layer)
    ordered = {layer: dict(sorted(experts[layer].items())) for layer in sorted(experts)}
    places = {layer: tuple(of_layer) for layer, of_layer in ordered.items()}
    size = sum(part.report.weight_bytes for part in parts)
    report = dataclasses.replace(
        _report(AdapterKind.ESFT, digest, name), weight_bytes=size, experts=places
    )
    return ExpertWeights(ordered, report)


def pair_of(lora: AdapterEntry, esft: AdapterEntry, digest: str, name: str) -> PairWeights:
    """Return a LoRA and an ESFT adapter as one."""
    size = lora.report.weight_bytes + esft.report.weight_bytes
    report = _report(AdapterKind.PAIR, digest, name)
    report = dataclasses.replace(report, weight_bytes=size, modules=lora.report.modules)
    return PairWeights(lora, esft, report)


def _report(kind: AdapterKind, digest: str, name: str) -> AdapterReport:
    return AdapterReport(
        kind=kind,
        folder=name,
        digest=digest,
        files={},
        file_bytes=0,
        weight_bytes=0,
        modules={},
        max_rank=0,
        num_tensors=0,
        base_model=None,
        peft_version=None,
    )
