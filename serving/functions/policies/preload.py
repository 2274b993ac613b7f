"""Artifacts to load before a request comes (ServerlessLoRA, section 4.1, Eq. 1 and 2).

The value of an artifact is the delay that its copy saves times the predicted rate of the functions
that use it, shared artifacts summed over all of them and stored once. A copy on the device takes
the place of one in host memory, so each artifact has one copy. Three constraints hold: capacity;
precedence, an artifact only where what it requires is loaded; coupling, an artifact on a device
only where its required models are on the same device.

The greedy plan takes the best value per byte first. What still misses its requirements goes with
them, at the density of the whole; what others require counts with those of its dependents that
raise its density, so that a backbone is judged by the functions that it opens. A byte weighs by the
share of its tier's idle memory, so that scarce device memory is dearer than host memory.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from serving.functions.policies.artifacts import Artifact, Place, by_name


@dataclasses.dataclass(frozen=True)
class Load:
    """A decision: the artifact is loaded into the place."""

    artifact: str
    place: str


def plan(
    artifacts: Sequence[Artifact], rates: Mapping[str, float], places: Sequence[Place]
) -> list[Load]:
    """Return what to load where, each artifact after those that it requires.

    `rates` are predicted requests per second by function. Artifacts of no value are not loaded.
    Raises ValueError for names that stand twice and for requirements that cannot be met.
    """
    return _Greedy(artifacts, rates, places).run()


def value_of(loads: Sequence[Load], artifacts, rates: Mapping[str, float], places) -> float:
    """Return Eq. 1 for a plan: the sum of delay saved x predicted rate."""
    named, where = {a.name: a for a in artifacts}, {p.name: p for p in places}
    return sum(
        (named[load.artifact].seconds(where[load.place].on_device) or 0.0)
        * named[load.artifact].rate(rates)
        for load in loads
    )


class _Greedy:
    """One run. Artifacts are numbers here, in an order in which requirements come first."""

    def __init__(
        self,
        artifacts: Sequence[Artifact],
        rates: Mapping[str, float],
        places: Sequence[Place],
    ):
        named = list(by_name(artifacts).values())
        number = {artifact.name: i for i, artifact in enumerate(named)}
        self.names, self.places = [a.name for a in named], list(places)
        self.sizes = [a.num_bytes for a in named]
        rated = [(a, a.rate(rates)) for a in named]
        # By tier, host first: what a copy is worth, None where there can be none.
        self.values = [
            [None if (s := a.seconds(tier)) is None else s * rate for a, rate in rated]
            for tier in (False, True)
        ]
        self.requires = [[number[name] for name in a.requires] for a in named]
        self.dependents: list[list[int]] = [[] for _ in named]
        for i, required in enumerate(self.requires):
            for j in required:
                self.dependents[j].append(i)
        self.free = [place.num_bytes for place in places]
        tiers = [sum(p.num_bytes for p in places if p.on_device is t) for t in (False, True)]
        self.costs = [[n / room if room else float("inf") for n in self.sizes] for room in tiers]
        self.placed: list[int | None] = [None] * len(named)
        self.heap: list[tuple[float, int, int, int]] = []
        self.groups = [0] * len(named)  # bytes of the artifact with what raises its density
        self.version = [[0] * len(named), [0] * len(named)]

    def run(self) -> list[Load]:
        for tier in (0, 1):
            for i in range(len(self.names)):
                self._push(i, tier)
        while self.heap:
            _, i, tier, version = heapq.heappop(self.heap)
            if version == self.version[tier][i]:
                self._try(i, tier)
        return [
            Load(self.names[i], self.places[place].name)
            for i, place in enumerate(self.placed)
            if place is not None
        ]

    def _on_device(self, i: int) -> bool:
        place = self.placed[i]
        return place is not None and self.places[place].on_device

    def _worth(self, i: int, tier: int) -> float | None:
        """Return what a copy adds to that which there is; None where it cannot be or is there."""
        value = self.values[tier][i]
        place = self.placed[i]
        if value is None or place is None:
            return value
        if self.places[place].on_device or not tier:
            return None
        return value - (self.values[0][i] or 0.0)

    def _bundle(self, i: int, tier: int) -> list[tuple[int, int]] | None:
        """Return (artifact, tier) of `i` and all it misses, requirements first; None: cannot be."""
        if self._worth(i, tier) is None:
            return None
        bundle: list[tuple[int, int]] = []
        for j in self.requires[i]:
            if tier and self.values[1][j] is not None:  # coupling: on the same device
                if self._on_device(j):
                    continue
                missing = self._bundle(j, 1)
            elif self.placed[j] is not None:
                continue
            else:
                missing = self._bundle(j, 0 if self.values[0][j] is not None else 1)
            if missing is None:
                return None
            bundle += [item for item in missing if item not in bundle]
        return [*bundle, (i, tier)]

    def _gain_and_cost(self, bundle: list[tuple[int, int]]) -> tuple[float, float]:
        gain = cost = 0.0
        for i, tier in bundle:
            gain += self._worth(i, tier) or 0.0
            cost += self.costs[tier][i]
        return gain, cost

    def _push(self, i: int, tier: int) -> None:
        """Queue a copy of `i` by the density of its bundle, with the dependents that raise it."""
        bundle = self._bundle(i, tier)
        self.version[tier][i] += 1
        if bundle is None:
            return
        gain, cost = self._gain_and_cost(bundle)
        if tier and self.dependents[i]:
            self.groups[i] = self._device_bytes(bundle)
            for more, dearer, num_bytes in self._chains(i, bundle):
                if gain * dearer < more * cost:
                    gain, cost = gain + more, cost + dearer
                    self.groups[i] += num_bytes
        if gain > 0 and cost < float("inf"):
            heapq.heappush(self.heap, (-gain / cost, i, tier, self.version[tier][i]))

    def _device_bytes(self, bundle: list[tuple[int, int]]) -> int:
        return sum(self.sizes[i] for i, tier in bundle if tier)

    def _chains(self, i: int, bundle: list[tuple[int, int]]) -> list[tuple[float, float, int]]:
        """Return (gain, cost, device bytes) of what rests on a device copy of `i`, densest first.

        A chain is an artifact that requires `i`, and one that requires this, where that is denser.
        """
        placed = set(bundle)
        chains = []
        for j in self.dependents[i]:
            best = 0.0, 1.0, 0
            for k in (j, *self.dependents[j]):
                members = [item for item in (self._bundle(k, 1) or ()) if item not in placed]
                gain, cost = self._gain_and_cost(members)
                if gain * best[1] > best[0] * cost:
                    best = gain, cost, self._device_bytes(members)
            if best[2]:
                chains.append(best)
        return sorted(chains, key=lambda chain: -chain[0] / chain[1])

    def _try(self, i: int, tier: int) -> None:
        """Place the bundle of `i` where it fits, if anywhere, and queue again what that changes."""
        bundle = self._bundle(i, tier)
        if bundle is None:
            return
        targets = self._targets(bundle)
        if targets is None:
            return
        for j, place in targets:
            old = self.placed[j]
            if old is not None:
                self.free[old] += self.sizes[j]
            self.free[place] -= self.sizes[j]
            self.placed[j] = place
        changed = {k for j, _ in targets for k in self.dependents[j]}
        changed |= {k for j in list(changed) for k in self.dependents[j]}
        changed |= {j for j, _ in targets}
        for j in changed:
            for each in (0, 1):
                self._push(j, each)

    def _targets(self, bundle: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """Return (artifact, place) for the bundle; None where it does not fit."""
        free = list(self.free)
        need = self._device_bytes(bundle)
        device = self._device(bundle, need) if need else None
        if need and device is None:
            return None
        targets = []
        for j, tier in bundle:
            place = device if tier else self._host(free, self.sizes[j])
            if place is None or free[place] < self.sizes[j]:
                return None
            free[place] -= self.sizes[j]
            targets.append((j, place))
        return targets

    def _host(self, free: list[int], num_bytes: int) -> int | None:
        """Return the fullest host place that still has the room."""
        fits = [
            (free[p], p)
            for p, place in enumerate(self.places)
            if not place.on_device and free[p] >= num_bytes
        ]
        return min(fits)[1] if fits else None

    def _device(self, bundle: list[tuple[int, int]], need: int) -> int | None:
        """Return the device that the bundle is bound to, else one for it and its dependents.

        That is the fullest one with room for the whole group, else the emptiest.
        """
        required = [k for j, tier in bundle if tier for k in self.requires[j]]
        bound = {self.placed[k] for k in required if self._on_device(k)}
        if bound:
            return bound.pop() if len(bound) == 1 else None
        rooms = [(self.free[p], p) for p, place in enumerate(self.places) if place.on_device]
        group = max(need, max(self.groups[j] for j, tier in bundle if tier))
        best = min((room for room in rooms if room[0] >= group), default=max(rooms, default=None))
        return best[1] if best and best[0] >= need else None
