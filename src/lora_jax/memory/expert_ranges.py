"""Which consecutive expert indices of a layer's weight tensors belong to whom. No jax."""

from lora_jax.memory.virtual import OutOfPages


class ExpertRanges:
    """The indices first .. first + capacity, given out in runs as tightly as possible.

    Base experts hold 0 .. first. Runs lie next to each other, so that neighbours share the page at
    their border (ExpertWeave, section 4.2). The same run serves gate, up and down of the layer.
    """

    def __init__(self, first: int, capacity: int):
        if first < 0 or capacity < 0:
            raise ValueError(f"first {first} and capacity {capacity} must not be negative")
        self.first, self.capacity = first, capacity
        # Sorted, disjoint, never touching one another.
        self._holes = [range(first, first + capacity)] if capacity else []
        self._taken: dict[int, range] = {}

    @property
    def num_free(self) -> int:
        """Return how many indices nobody has."""
        return sum(len(hole) for hole in self._holes)

    @property
    def taken(self) -> tuple[range, ...]:
        """Return the runs given out, in order."""
        return tuple(self._taken[start] for start in sorted(self._taken))

    def allocate(self, count: int) -> range:
        """Return `count` free consecutive indices from the smallest hole that has them.

        Raises:
            ValueError: a count below 1.
            OutOfPages: no hole is long enough; nothing has changed.
        """
        if count < 1:
            raise ValueError(f"cannot allocate {count} experts")
        fitting = [hole for hole in self._holes if len(hole) >= count]
        if not fitting:
            longest = max(map(len, self._holes), default=0)
            raise OutOfPages(
                f"no {count} consecutive expert indices are free: {self.num_free} of "
                f"{self.capacity} are, at most {longest} in a row"
            )
        hole = min(fitting, key=len)
        at = self._holes.index(hole)
        rest = hole[count:]
        self._holes[at : at + 1] = [rest] if rest else []
        self._taken[hole.start] = hole[:count]
        return hole[:count]

    def free(self, indices: range) -> None:
        """Take a run back; ValueError unless it was given out just so."""
        if self._taken.get(indices.start) != indices:
            raise ValueError(f"expert indices {indices} were not given out as one run")
        del self._taken[indices.start]
        merged: list[range] = []
        for hole in sorted([*self._holes, indices], key=lambda hole: hole.start):
            if merged and merged[-1].stop == hole.start:
                hole = range(merged.pop().start, hole.stop)
            merged.append(hole)
        self._holes = merged

    def check_integrity(self) -> None:
        """Assert that holes and runs tile the capacity and that no two holes touch."""
        parts = sorted([*self._holes, *self._taken.values()], key=lambda part: part.start)
        reached = self.first
        for part in parts:
            assert part.start == reached, "holes and runs overlap or leave a gap"
            reached = part.stop
        assert reached == self.first + self.capacity, "holes and runs do not fill the capacity"
        ends = {hole.stop for hole in self._holes}
        assert not ends & {hole.start for hole in self._holes}, "two holes touch"
