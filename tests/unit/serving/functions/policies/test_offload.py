"""Offloading frees what is asked for, at a value near the least of all subsets."""

import itertools
import random

import pytest

from serving.functions.policies.offload import NoRoomError, Resident, plan


def device(seed: int, backbones: int = 2) -> list[Resident]:
    """Return some backbones with two functions each: an adapter and a context per function."""
    rng = random.Random(seed)
    found = []
    for b in range(backbones):
        name = f"backbone-{b}"
        busy = [rng.random() < 0.3 for _ in range(2)]
        found.append(Resident(name, rng.randint(2000, 4000), rng.uniform(1, 9), any(busy)))
        for f, running in enumerate(busy):
            for kind, most in (("adapter", 200), ("context", 600)):
                size, value = rng.randint(50, most), rng.uniform(0, 1)
                found.append(Resident(f"{kind}-{b}{f}", size, value, running, name))
    return found


def exhaustive(residents, need) -> float | None:
    """Return the least value of all subsets that may leave and free enough."""
    best = None
    free = [r for r in residents if not r.in_use]
    for count in range(len(free) + 1):
        for chosen in itertools.combinations(free, count):
            names = {r.name for r in chosen}
            stranded = any(r.backbone in names and r.name not in names for r in residents)
            if not stranded and sum(r.num_bytes for r in chosen) >= need:
                value = sum(r.value for r in chosen)
                best = value if best is None else min(best, value)
    return best


def test_plans_are_near_the_best_of_all_subsets():
    losses = []
    for seed in range(40):
        residents = device(seed)
        named = {r.name: r for r in residents}
        room = sum(r.num_bytes for r in residents if not r.in_use)
        for need in (1, room // 9, room // 4, room // 2):
            best = exhaustive(residents, need)
            if best is None:
                with pytest.raises(NoRoomError):
                    plan(residents, need)
                continue
            chosen = plan(residents, need)
            gone = [named[name] for name in chosen]
            assert len(set(chosen)) == len(chosen)
            assert not any(r.in_use for r in gone)
            assert sum(r.num_bytes for r in gone) >= need
            assert not any(r.backbone in chosen and r.name not in chosen for r in residents)
            total = sum(r.value for r in residents)
            losses.append((sum(r.value for r in gone) - best) / total)
    assert sum(losses) / len(losses) < 0.05


def test_backbone_of_a_running_function_stays():
    residents = [
        Resident("backbone", 1000, 0.0),
        Resident("idle", 10, 5.0, backbone="backbone"),
        Resident("busy", 10, 5.0, in_use=True, backbone="backbone"),
    ]
    assert plan(residents, 10) == ["idle"]
    with pytest.raises(NoRoomError, match=r"11 bytes are asked for.* is 10 bytes"):
        plan(residents, 11)


def test_nothing_leaves_where_nothing_is_asked_for():
    assert plan(device(0), 0) == []


def test_what_proved_needless_stays():
    small, large = Resident("small", 10, 0.1), Resident("large", 100, 2.0)
    assert plan([small, large], 100) == ["large"]
