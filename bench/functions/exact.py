"""The best pre-loading plan by mixed-integer programming, for comparison with the greedy one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from serving.functions.policies.artifacts import Artifact, Place

_GB = 1 << 30


def best_value(
    artifacts: Sequence[Artifact],
    rates: Mapping[str, float],
    places: Sequence[Place],
    limit_s: float,
) -> tuple[float, float]:
    """Return the best plan's value that HiGHS finds in the time, and its upper bound.

    An artifact needs one copy at most: one on the device is worth more than one in host memory.
    """
    names = [
        (a.name, p.name) for a in artifacts for p in places if a.seconds(p.on_device) is not None
    ]
    column = {name: i for i, name in enumerate(names)}
    tier = {place.name: place.on_device for place in places}
    named = {artifact.name: artifact for artifact in artifacts}
    value = [(named[a].seconds(tier[p]) or 0.0) * named[a].rate(rates) for a, p in names]
    rows, limits = _constraints(artifacts, places, column)
    entries = [(i, j, weight) for i, row in enumerate(rows) for j, weight in row.items()]
    i, j, weights = zip(*entries, strict=True)
    matrix = coo_array((weights, (i, j)), shape=(len(rows), len(names))).tocsr()
    most: Any = np.array(limits)
    found = milp(
        -np.array(value),
        constraints=LinearConstraint(matrix, -np.inf, most),
        integrality=np.ones(len(names)),
        bounds=Bounds(0, 1),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
    )
    return -float(found.fun), -float(found.mip_dual_bound)


def _constraints(artifacts, places, column) -> tuple[list[dict[int, float]], list[float]]:
    """Return rows and upper limits: capacity, one copy, precedence, coupling."""
    named = {artifact.name: artifact for artifact in artifacts}
    rows: list[dict[int, float]] = []
    limits: list[float] = []
    for place in places:
        held = [a for a in artifacts if (a.name, place.name) in column]
        rows.append({column[a.name, place.name]: a.num_bytes / _GB for a in held})
        limits.append(place.num_bytes / _GB)
    copies = {
        a.name: [column[k] for p in places if (k := (a.name, p.name)) in column] for a in artifacts
    }
    for artifact in artifacts:
        rows.append(dict.fromkeys(copies[artifact.name], 1.0))
        limits.append(1.0)
        for required in artifact.requires:
            rows.append(
                dict.fromkeys(copies[artifact.name], 1.0) | dict.fromkeys(copies[required], -1.0)
            )
            limits.append(0.0)
            if named[required].device_s is None:
                continue
            for place in places:
                if place.on_device and (artifact.name, place.name) in column:
                    there = column[required, place.name]
                    rows.append({column[artifact.name, place.name]: 1.0, there: -1.0})
                    limits.append(0.0)
    return rows, limits
