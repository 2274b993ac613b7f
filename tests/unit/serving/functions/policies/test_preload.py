"""Pre-loading plans keep every constraint and come near the best of all plans."""

import itertools
import random

import pytest

from serving.functions.policies.artifacts import Artifact, Place
from serving.functions.policies.preload import Load, plan, value_of

MIB = 1 << 20


def instance(seed: int, functions: int, backbones: int, containers: int, devices: int):
    """Return artifacts, rates and places with the sizes and times of 7B to 13B models."""
    rng = random.Random(seed)
    rates = {f"f{f}": 10 ** rng.uniform(-3, 0) for f in range(functions)}
    artifacts = []
    for b in range(backbones):
        size, users = rng.choice([13_500, 16_000, 26_000]), list(rates)[b::backbones]
        name, seconds = f"backbone-{b}", size / 3000
        artifacts.append(
            Artifact(name, size * MIB, tuple(users), host_s=seconds, device_s=seconds * 1.2)
        )
        for f in users:
            size, one = rng.randint(20, 400), (f,)
            needs = (f"libraries-{f}", name)
            artifacts += [
                Artifact(f"libraries-{f}", rng.randint(1000, 4000) * MIB, one, rng.uniform(2, 6)),
                Artifact(f"adapter-{f}", size * MIB, one, size / 500, size / 300, needs),
                Artifact(f"context-{f}", 473 * MIB, one, device_s=2.5, requires=(f"adapter-{f}",)),
            ]
    places = [Place(f"C{c}", rng.randint(4, 32) * 1000 * MIB, False) for c in range(containers)]
    places += [Place(f"G{g}", rng.randint(12, 44) * 1000 * MIB, True) for g in range(devices)]
    return artifacts, rates, places


def is_allowed(artifacts, places, where: dict[str, Place]) -> bool:
    """Say whether artifact -> place keeps capacity, precedence and coupling."""
    named = {a.name: a for a in artifacts}
    for place in places:
        if sum(named[n].num_bytes for n, p in where.items() if p is place) > place.num_bytes:
            return False
    for name, place in where.items():
        if named[name].seconds(place.on_device) is None:
            return False
        for required in named[name].requires:
            coupled = place.on_device and named[required].device_s is not None
            if required not in where or (coupled and where[required] is not place):
                return False
    return True


def exhaustive(artifacts, rates, places) -> float:
    """Return the best value of all plans."""
    choices = [
        [None, *(p for p in places if a.seconds(p.on_device) is not None)] for a in artifacts
    ]
    best = 0.0
    for chosen in itertools.product(*choices):
        where = {a.name: p for a, p in zip(artifacts, chosen, strict=True) if p is not None}
        loads = [Load(name, place.name) for name, place in where.items()]
        value = value_of(loads, artifacts, rates, places)
        if value > best and is_allowed(artifacts, places, where):
            best = value
    return best


def test_plans_are_near_the_best_of_all_plans():
    """Among so few artifacts, one that does not fit weighs much."""
    losses = []
    for seed in range(12):
        case = instance(seed, 2, 1 + seed % 2, 1, 1 + seed % 2)
        best = exhaustive(*case)
        losses.append(1 - value_of(plan(*case), *case) / best)
        assert losses[-1] > -1e-9
    assert sum(losses) / len(losses) <= 0.03


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_the_paper_s_size_keep_every_constraint(seed):
    artifacts, rates, places = instance(seed, 50, 20, 20, 20)
    loads = plan(artifacts, rates, places)
    named = {place.name: place for place in places}
    where = {load.artifact: named[load.place] for load in loads}
    assert len(where) == len(loads)
    assert is_allowed(artifacts, places, where)
    seen = set()
    for load in loads:
        requires = next(a.requires for a in artifacts if a.name == load.artifact)
        assert seen.issuperset(requires)
        seen.add(load.artifact)


def test_backbone_is_judged_by_the_functions_that_it_opens():
    """Alone, the lone function's backbone is denser; with its functions the other one is."""
    shared = Artifact("shared", 100, ("a", "b"), device_s=1.0)
    lone = Artifact("lone", 90, ("c",), device_s=2.4)
    contexts = [
        Artifact(f"context-{f}", 10, (f,), device_s=5.0, requires=("shared",)) for f in "ab"
    ]
    loads = plan([lone, shared, *contexts], dict.fromkeys("abc", 1.0), [Place("G", 120, True)])
    assert [load.artifact for load in loads] == ["shared", "context-a", "context-b"]


def test_device_copy_takes_the_place_of_the_host_copy():
    """The host copy's room is free again for an artifact that fitted nowhere."""
    model = Artifact("model", 10, ("a",), host_s=9.0, device_s=10.0)
    other = Artifact("other", 10, ("a",), host_s=0.1)
    places = [Place("C", 10, False), Place("G", 1000, True)]
    loads = plan([model, other], {"a": 1.0}, places)
    assert loads == [Load("model", "G"), Load("other", "C")]


def test_model_on_one_device_draws_its_adapter_there():
    adapter = Artifact("adapter", 5, ("a",), device_s=1.0, requires=("backbone",))
    backbone = Artifact("backbone", 50, ("a",), device_s=2.0)
    full = [Place("small", 10, True), Place("large", 55, True)]
    assert {load.place for load in plan([adapter, backbone], {"a": 1.0}, full)} == {"large"}


def test_models_on_two_devices_have_no_common_adapter():
    first, second = (Artifact(n, 50, ("a",), device_s=9.0) for n in ("first", "second"))
    both = Artifact("both", 1, ("a",), device_s=0.1, requires=("first", "second"))
    places = [Place("G0", 51, True), Place("G1", 51, True)]
    assert "both" not in {load.artifact for load in plan([first, second, both], {"a": 1}, places)}


def test_functions_without_requests_load_nothing():
    artifacts, rates, places = instance(0, 4, 1, 1, 1)
    assert plan(artifacts, dict.fromkeys(rates, 0.0), places) == []
    assert plan(artifacts, rates, []) == []
