"""A registry whose host memory adapters in use take: requests wait for room."""

import shutil
import threading

import pytest
from support.cases import adapter_cases as cases
from support.waiting import wait_until

from lora_jax.adapters.host_memory.room_line import wait_in_line
from lora_jax.adapters.registry import (
    AdapterNotFound,
    AdapterRegistry,
    HostFull,
    RegistryLimits,
)


@pytest.fixture
def root(tmp_path):
    """Four adapters of one size, of which the registries below have room for two."""
    for seed, name in enumerate(("sql", "law", "med", "art")):
        cases.write_adapter(tmp_path / name, cases.dense_tensors(seed=seed))
    return tmp_path


def two(root, keep=lambda weights: weights) -> AdapterRegistry:
    size = AdapterRegistry(cases.llama(), lora_dir=root).resolve("sql").report.weight_bytes
    limits = RegistryLimits(max_total_bytes=2 * size)
    return AdapterRegistry(cases.llama(), lora_dir=root, limits=limits, keep=keep)


def loaded(names: AdapterRegistry) -> list[str]:
    return [entry.name for entry in names.entries()]


def in_turn(names: AdapterRegistry, name: str, wait_s: float = 0.0, **options):
    """What a request gets, after so many seconds at most."""
    return wait_in_line(names.line, lambda t: names.resolve(name, ticket=t), wait_s, **options)


def test_a_request_waits_until_an_adapter_in_use_is_idle(root):
    names = two(root)
    names.load("law", "law", pinned=True)
    used = {names.resolve("sql").digest}
    names.set_in_use(lambda: used)
    found: list = []
    request = threading.Thread(target=lambda: found.append(in_turn(names, "med", 60.0)))
    request.start()
    wait_until(lambda: len(names.line) == 1)
    with pytest.raises(HostFull, match=r"Adapter 'art': .* Raise max_total_adapter_bytes"):
        in_turn(names, "art")  # a later one, which may not wait
    with pytest.raises(AdapterNotFound):  # at once
        in_turn(names, "nobody", 60.0)
    used.clear()
    names.line.changed()
    request.join(60)
    assert [entry.name for entry in found] == ["med"]
    assert loaded(names) == ["law", "med"]
    with pytest.raises(HostFull):  # the caller holds it, though no request of an engine does
        in_turn(names, "sql")
    names.handed_in(found[0])
    assert in_turn(names, "sql").name == "sql"


def test_a_folder_that_found_no_room_is_known_and_read_once_more(root):
    reads: list = []
    names = two(root, keep=lambda weights: reads.append(weights) or weights)
    used = {names.resolve(name).digest for name in ("sql", "law")}
    names.set_in_use(lambda: used)
    for _ in range(3):
        with pytest.raises(HostFull):
            in_turn(names, "med")
    assert len(reads) == 3, "its size is known: it is not read before there is room"
    assert names.knows("med")
    used.clear()
    assert in_turn(names, "med").name == "med"
    assert len(reads) == 4


def test_room_is_held_while_files_are_read(root):
    """Two requests read at once: neither evicts what the other one reads for."""
    entered, go = threading.Barrier(3), threading.Event()
    slow: set[str] = set()

    def keep(weights):
        if weights.digest in slow:
            entered.wait(60)
            assert go.wait(60)
        return weights

    names = two(root, keep=keep)
    slow |= {names.resolve(name).digest for name in ("med", "art")}
    for name in ("sql", "law"):
        names.resolve(name)
    found: list = []
    threads = [
        threading.Thread(target=lambda n=name: found.append(in_turn(names, n, 60.0)))
        for name in ("med", "art")
    ]
    for thread in threads:
        thread.start()
    entered.wait(60)
    assert loaded(names) == []
    with pytest.raises(HostFull):
        in_turn(names, "sql")
    go.set()
    for thread in threads:
        thread.join(60)
    assert sorted(entry.name for entry in found) == loaded(names) == ["art", "med"]


def test_a_read_that_fails_gives_its_room_back(root):
    names = two(root)
    for name in ("sql", "law", "med"):
        names.resolve(name)
    shutil.rmtree(root / "sql")
    with pytest.raises(AdapterNotFound):
        in_turn(names, "sql")
    names.load("again", "art")
    assert loaded(names) == ["again", "law"] or loaded(names) == ["again", "med"]
    assert not names._tier.copies.holds_room
