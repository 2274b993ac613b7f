"""Artifacts that leave a device to make room (ServerlessLoRA, section 4.3, Eq. 7 and 8)."""

import dataclasses
from collections.abc import Sequence


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
    bundles = [[r] for r in parts if r.name not in backbones]
    plans = [_cheapest(bundles, need_bytes)]
    free = backbones - {r.backbone for r in residents if r.in_use}
    if whole := [r for r in parts if r.name in free]:
        held = {r.name: [x for x in parts if x.backbone == r.name] + [r] for r in whole}
        rest = [[r] for r in parts if r.name not in backbones and r.backbone not in held]
        plans.append(_cheapest([*rest, *held.values()], need_bytes))
    found = [chosen for chosen in plans if chosen is not None]
    if not found:
        room = sum(r.num_bytes for bundle in bundles for r in bundle)
        room += sum(r.num_bytes for r in parts if r.name in free)
        raise NoRoomError(
            f"{need_bytes} bytes are asked for; what no running function uses is {room} bytes."
        )
    best = min(found, key=lambda chosen: sum(r.value for r in chosen))
    return [r.name for r in best]


def _cheapest(bundles: list[list[Resident]], need_bytes: int) -> list[Resident] | None:
    """Return the greedy choice among groups that leave together; None: all are too little."""
    sized = [(sum([r.num_bytes for r in b]), sum([r.value for r in b]), b) for b in bundles]
    sized.sort(key=lambda item: item[1] / item[0])
    chosen, freed = [], 0
    for item in sized:
        chosen.append(item)
        freed += item[0]
        if freed >= need_bytes:
            break
    if freed < need_bytes:
        return None
    return [r for item in _without_needless(sized, chosen, freed - need_bytes) for r in item[2]]


def _without_needless(sized: list, chosen: list, spare: int) -> list:
    """Return `chosen` less what `spare` bytes allow; its last one may be swapped for a cheaper."""
    *others, last = chosen
    short = last[0] - spare  # bytes that the others lack
    cheaper = [item for item in sized[len(chosen) :] if item[0] >= short and item[1] < last[1]]
    if cheaper:
        last = min(cheaper, key=lambda item: item[1])
        spare = last[0] - short
    kept = [last]
    for item in sorted(others, key=lambda item: -item[1]):
        if item[0] <= spare:
            spare -= item[0]
        else:
            kept.append(item)
    return kept[::-1]
