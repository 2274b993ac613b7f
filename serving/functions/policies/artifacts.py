"""Parts that a function needs before its first token, and places that can hold them in advance."""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A part that can be loaded before a request asks for it.

    Attributes:
        name: unique among the artifacts of a plan.
        num_bytes: memory of one copy, wherever it lies.
        functions: those that use it; a backbone has many, an adapter one.
        host_s: seconds of a cold start that a copy in host memory saves; None: it has no such copy.
        device_s: the same for a copy on the device, at least `host_s`; None: it has no such copy.
        requires: names of artifacts that are loaded first (libraries, then backbone, then adapter,
            then context).

    Raises ValueError for sizes and seconds below 0, and for one without any place.
    """

    name: str
    num_bytes: int
    functions: tuple[str, ...]
    host_s: float | None = None
    device_s: float | None = None
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        saved = [seconds for seconds in (self.host_s, self.device_s) if seconds is not None]
        if not saved:
            raise ValueError(f"artifact {self.name!r} has neither host_s nor device_s.")
        if self.num_bytes < 1 or not all(0 <= seconds < float("inf") for seconds in saved):
            raise ValueError(
                f"artifact {self.name!r}: num_bytes must be 1 or more and seconds 0 or more, "
                f"got {self.num_bytes} bytes, {saved} s."
            )
        if saved[-1] < saved[0]:
            raise ValueError(
                f"artifact {self.name!r}: device_s {self.device_s} is below host_s {self.host_s}."
            )

    def rate(self, rates: Mapping[str, float]) -> float:
        """Return predicted requests per second that use it: the sum over its functions."""
        return sum(rates.get(name, 0.0) for name in self.functions)

    def seconds(self, on_device: bool) -> float | None:
        """Return what a copy saves in that kind of place; None where it has no copy there."""
        return self.device_s if on_device else self.host_s


@dataclasses.dataclass(frozen=True)
class Place:
    """Idle memory that is there already: of a container, or of a device."""

    name: str
    num_bytes: int
    on_device: bool


def by_name(artifacts: Sequence[Artifact]) -> dict[str, Artifact]:
    """Return the artifacts by name, each after those that it requires.

    Raises ValueError for a name that stands twice, an unknown requirement, and a circle.
    """
    named = {artifact.name: artifact for artifact in artifacts}
    if len(named) != len(artifacts):
        twice = sorted({a.name for a in artifacts if named[a.name] is not a})
        raise ValueError(f"artifacts stand twice: {', '.join(twice)}.")
    ordered: dict[str, Artifact] = {}
    waiting = list(artifacts)
    while waiting:
        ready = [a for a in waiting if ordered.keys() >= set(a.requires)]
        if not ready:
            stuck = ", ".join(f"{a.name} requires {', '.join(a.requires)}" for a in waiting)
            raise ValueError(f"requirements are unknown or go in a circle: {stuck}.")
        ordered |= {artifact.name: artifact for artifact in ready}
        waiting = [artifact for artifact in waiting if artifact.name not in ordered]
    return ordered
