"""Adapters leave the host memory of a registry for others, and come back by name."""

import re
import shutil
import threading

import pytest
from support.cases import adapter_cases as cases
from support.cases.registry_cases import Clock, loaded, registry, write_root

from lora_jax.adapters.registry import (
    AdapterExists,
    AdapterNotFound,
    AdapterRegistry,
    AdapterRejected,
    HostShare,
    RegistryBusy,
    RegistryLimits,
)


@pytest.fixture
def root(tmp_path):
    return write_root(tmp_path)


def test_not_found_lists_the_evicted_too(big_root):
    names = two(big_root)
    for name in ("law", "sql", "med"):
        names.load(name, name)
    assert len(loaded(names)) == 2
    with pytest.raises(AdapterNotFound, match="Known: law, med, sql"):
        names.get("nobody")


def size_of(root, name: str) -> int:
    return registry(root).load(name, name).report.weight_bytes


@pytest.fixture
def big_root(root):
    """Four adapters of one size, of which the registries below have room for two."""
    for seed, name in enumerate(("med", "art"), 20):
        cases.write_adapter(root / name, cases.dense_tensors(seed=seed))
    return root


def two(root, **limits) -> AdapterRegistry:
    return registry(root, max_total_bytes=2 * size_of(root, "sql"), **limits)


def test_a_full_host_evicts_what_was_not_used_for_longest(big_root):
    names = two(big_root)
    names.resolve("sql")
    names.resolve("law")
    names.get("sql")
    generation = names.generation
    names.resolve("med")
    assert loaded(names) == ["med", "sql"]
    assert names.generation > generation + 1, "the device must hear of both"
    assert [a.name for a in names.known()] == ["law", "med", "sql"]
    digest = next(a.digest for a in names.known() if a.name == "law")
    assert names.resolve("law").digest == digest
    assert loaded(names) == ["law", "med"]


def test_a_full_host_holds_twice_the_adapters_in_8_bits(big_root):
    """Short rows, whose tails of 16 bytes count: there is room for two and a half."""
    adapters, room = ("sql", "law", "med", "art"), int(2.5 * size_of(big_root, "sql"))
    plain = registry(big_root, max_total_bytes=room)
    coded = registry(big_root, max_total_bytes=room, keep=lambda weights: weights.in_8_bits())
    for name in adapters:
        plain.load(name, name)
        coded.load(name, name)
    assert loaded(plain) == ["art", "med"]
    assert loaded(coded) == sorted(adapters)


def test_what_is_in_use_or_pinned_is_not_evicted(big_root):
    names = two(big_root)
    used = {names.resolve("sql").digest}
    names.set_in_use(lambda: used)
    names.load("law", "law", pinned=True)
    with pytest.raises(RegistryBusy, match="adapters in use take all host memory") as busy:
        names.resolve("med")
    assert busy.value.retry_after_s > 0
    assert not busy.value.of_key
    assert not re.search(r"\d", str(busy.value).replace("'med'", "")), "it tells others' sizes"
    used.clear()
    names.resolve("art")
    assert loaded(names) == ["art", "law"]


def test_what_is_kept_is_evicted_when_nothing_else_is_left(big_root):
    names = two(big_root)
    names.set_kept(lambda: {"sql"})
    names.resolve("sql")
    for name in ("law", "med", "art", "law"):  # later, and more often
        names.resolve(name)
    assert loaded(names) == ["law", "sql"]
    names.load("law", "law", replace=True, pinned=True)
    names.resolve("art")
    assert loaded(names) == ["art", "law"]


def test_an_explicit_load_stays_known_and_a_changed_file_is_refused(big_root):
    names = two(big_root)
    names.load("mine", "sql")
    names.resolve("law")
    names.resolve("med")
    assert loaded(names) == ["law", "med"]
    assert names.knows("mine")
    with pytest.raises(AdapterExists):
        names.load("mine", "sql")
    cases.write_adapter(big_root / "sql", cases.dense_tensors(seed=77))
    with pytest.raises(AdapterRejected, match="files have changed since it was loaded"):
        names.resolve("mine")
    names.load("mine", "sql", replace=True)
    assert names.resolve("mine") is names.get("mine")
    assert names.unload("mine").name == "mine"
    assert not names.knows("mine")


def test_a_folder_that_has_gone_is_told_of_a_name_that_was_loaded(big_root):
    """Not that the name does not exist: it is listed. One that callers merely used is forgotten."""
    names = two(big_root)
    names.load("mine", "sql")
    for name in ("law", "med", "art"):
        names.resolve(name)
    for folder in ("sql", "law"):
        shutil.rmtree(big_root / folder)
    with pytest.raises(AdapterRejected, match="'mine': its folder has gone since it was loaded"):
        names.resolve("mine")
    assert names.knows("mine")
    assert names.knows("law")
    with pytest.raises(AdapterNotFound, match="'law' was not found"):
        names.resolve("law")
    assert not names.knows("law")
    names.unload("mine")
    with pytest.raises(AdapterNotFound, match="'mine' does not exist"):
        names.resolve("mine")


def test_an_operators_folder_is_read_again_from_outside_the_root(big_root):
    names = two(big_root)
    names.load_all({"mine": big_root.parent / "secret"})
    names.resolve("law")
    names.resolve("med")
    assert "mine" not in loaded(names)
    assert names.resolve("mine").path == "secret"


def test_an_evicted_name_can_be_unloaded(big_root):
    names = two(big_root)
    sql, *_ = (names.resolve(name).digest for name in ("sql", "law", "med"))
    assert names.knows_digest(sql)
    assert names.digest_of("sql") == sql  # as before it was evicted
    assert names.unload("sql").name == "sql"
    assert not names.knows("sql")
    assert not names.knows_digest(sql)
    assert names.digest_of("sql") is None


def test_an_unload_holds_for_a_name_that_is_being_read_again(big_root):
    reads, entered, go = [], threading.Event(), threading.Event()

    def keep(weights):
        reads.append(weights.digest)
        if reads.count(weights.digest) == 2:
            entered.set()
            assert go.wait(60)
        return weights

    limits = RegistryLimits(max_in_memory=1)
    names = AdapterRegistry(cases.llama(), lora_dir=big_root, limits=limits, keep=keep)
    names.load("sql@v2", "sql")
    names.load("law", "law")  # which evicts the other
    errors: list = []

    def ask() -> None:
        with pytest.raises(AdapterNotFound) as error:
            names.resolve("sql@v2")
        errors.append(error.value)

    request = threading.Thread(target=ask)
    request.start()
    assert entered.wait(60)
    names.unload("sql@v2")  # is answered: the name stands for nothing from now on
    go.set()
    request.join(60)
    assert "Known: law" in str(errors[0])
    assert not names.knows("sql@v2")
    assert not names._tier.copies.holds_room
    assert names.load("sql@v2", "sql").name == "sql@v2", "it can be loaded again"


def test_an_unload_brings_files_that_were_refused_as_changed(big_root):
    """The refusal is remembered for seconds, and says itself that an unload is a way out."""
    names = two(big_root)
    for name in ("sql", "law", "med"):
        names.resolve(name)
    cases.write_adapter(big_root / "sql", cases.dense_tensors(seed=77))
    for _ in range(2):
        with pytest.raises(AdapterRejected, match="or unload it first"):
            names.resolve("sql")
    before = names.unload("sql").digest
    assert names.resolve("sql").digest != before


def test_names_that_callers_used_make_way_for_others(big_root):
    names = registry(big_root, max_adapters=2)
    names.load("mine", "secret/../sql")
    for name in ("law", "med", "art", "law"):
        names.resolve(name)
    assert [a.name for a in names.known()] == ["law", "mine"]
    names.load("second", "med")
    with pytest.raises(RegistryBusy, match="max_adapters=2; unload one"):
        names.resolve("art")


def test_a_callers_own_limit_evicts_its_own_and_refuses_what_is_in_use(big_root):
    names = registry(big_root)
    share = HostShare("a", max_adapters=1)
    names.resolve("law")
    used = {names.resolve("sql", share).digest}
    names.set_in_use(lambda: used)
    with pytest.raises(RegistryBusy, match=r"max_adapters=1") as busy:
        names.resolve("med", share)
    assert busy.value.of_key
    names.resolve("med", HostShare("b", max_adapters=1))
    used.clear()
    names.resolve("art", share)
    assert loaded(names) == ["art", "law", "med"]


def test_a_load_beyond_the_rate_says_when_to_come_again(big_root):
    clock = Clock()
    names = AdapterRegistry(
        cases.llama(), lora_dir=big_root, limits=RegistryLimits(loads_per_minute=1), clock=clock
    )
    names.resolve("sql")
    clock.now += 20
    with pytest.raises(RegistryBusy) as busy:
        names.resolve("law")
    assert busy.value.retry_after_s == 40
    clock.now += 41
    names.resolve("law")
