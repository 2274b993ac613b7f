"""Artifacts that leave a device to make room (ServerlessLoRA, section 4.3, Eq. 7 and 8)."""

import dataclasses
import operator
from collections.abc import Sequence

_DENSITY, _VALUE = operator.itemgetter(0), operator.itemgetter(2)


@dataclasses.dataclass(frozen=True)
class Resident:
    """An artifact that lies on the device.

    Attributes:
        name: unique on the device.
        num_bytes: freed when it leaves.
        value: seconds of delay per second that its leaving costs (load time x predicted rate).
        in_use: a function runs on it; it stays.
        backbone: name of the artifact that it is useless without; it leaves together with that.
    """

    name: str
    num_bytes: int
    value: float
    in_use: bool = False
    backbone: str | None = None


class NoRoomError(ValueError):
    """All that is not in use is less than what was asked for."""


def plan(residents: Sequence[Resident], need_bytes: int) -> list[str]:
    """Return names that free at least `need_bytes` at little value, in the order of leaving.

    Greedy by rising value per byte, then without what proved needless, dearest first. Of two such
    plans the cheaper one is taken: with adapters and contexts alone, and with backbones that no
    function in use stands on, each together with what stands on it.

    Raises NoRoomError: everything not in use is less.
    """
    if need_bytes <= 0:
        return []
    parts = [r for r in residents if not r.in_use]
    backbones = {r.backbone for r in residents if r.backbone}
    singles = [_alone(r) for r in parts if r.name not in backbones]
    plans = [_cheapest(singles, need_bytes)]
    free = backbones - {r.backbone for r in residents if r.in_use}
    if whole := [r for r in parts if r.name in free]:
        held = {r.name: [x for x in parts if x.backbone == r.name] + [r] for r in whole}
        rest = [_alone(r) for r in parts if r.name not in backbones and r.backbone not in held]
        plans.append(_cheapest(rest + [_together(group) for group in held.values()], need_bytes))
    found = [chosen for chosen in plans if chosen is not None]
    if not found:
        room = sum(r.num_bytes for r in parts if r.name in free or r.name not in backbones)
        raise NoRoomError(
            f"{need_bytes} bytes are asked for; what no running function uses is {room} bytes."
        )
    best = min(found, key=lambda chosen: sum(r.value for r in chosen))
    return [r.name for r in best]


# Residents that leave together, behind their value per byte, bytes and value.
_Group = tuple[float, int, float, list[Resident]]


def _alone(resident: Resident) -> _Group:
    size, value = resident.num_bytes, resident.value
    return value / size, size, value, [resident]


def _together(residents: list[Resident]) -> _Group:
    size, value = sum(r.num_bytes for r in residents), sum(r.value for r in residents)
    return value / size, size, value, residents


def _cheapest(groups: list[_Group], need_bytes: int) -> list[Resident] | None:
    """Return the greedy choice among the groups; None: all are too little."""
    groups = sorted(groups, key=_DENSITY)
    chosen, freed = 0, 0
    while freed < need_bytes:
        if chosen == len(groups):
            return None
        freed += groups[chosen][1]
        chosen += 1
    kept = _without_needless(groups, chosen, freed - need_bytes)
    return [resident for group in kept for resident in group[3]]


def _without_needless(groups: list[_Group], chosen: int, spare: int) -> list[_Group]:
    """Return the first groups less what `spare` bytes allow; the last may become a cheaper one."""
    last = groups[chosen - 1]
    short = last[1] - spare  # bytes that the others lack
    cheaper = [group for group in groups[chosen:] if group[1] >= short and group[2] < last[2]]
    if cheaper:
        last = min(cheaper, key=_VALUE)
        spare = last[1] - short
    kept = [last]
    for group in sorted(groups[: chosen - 1], key=_VALUE, reverse=True):
        if group[1] <= spare:
            spare -= group[1]
        else:
            kept.append(group)
    return kept[::-1]
