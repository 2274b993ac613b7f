"""Names and adapters: published whole or not at all, replaced, confined, limited."""

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import adapter_cases as cases
from support.cases.registry_cases import Clock, loaded, registry, write_root

from lora_jax.adapters.registry import (
    AdapterExists,
    AdapterNotFound,
    AdapterRegistry,
    AdapterRejected,
    RegistryLimits,
)


@pytest.fixture
def root(tmp_path):
    return write_root(tmp_path)


def test_load_get_unload(root):
    names = registry(root)
    entry = names.load("a", "sql", pinned=True)
    assert (entry.name, entry.kind, entry.path, entry.pinned) == ("a", "lora", "sql", True)
    assert entry.digest == entry.report.digest
    assert names.get("a") is entry
    assert names.entries() == (entry,)
    assert names.unload("a") is entry
    with pytest.raises(AdapterNotFound, match=r"'a' does not exist\. Known: none"):
        names.get("a")
    with pytest.raises(AdapterNotFound):
        names.unload("a")


def test_a_load_is_published_inside_of_its_record_or_not_at_all(root):
    names = registry(root)
    old = names.load("a", "sql")
    seen = []

    @contextlib.contextmanager
    def recorded(entry):
        seen.append((entry.digest, names.get("a")))
        yield
        seen.append(names.get("a"))

    new = names.load("a", "law", replace=True, recorded=recorded)
    assert seen == [(new.digest, old), new]

    def full(_):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        names.load("a", "sql", replace=True, recorded=full)
    with pytest.raises(OSError, match="no space"):
        names.load("b", "sql", recorded=full)
    assert names.entries() == (new,)


def test_not_found_lists_the_known_and_is_a_key_error(root):
    names = registry(root)
    names.load("law", "law")
    names.load("sql", "sql")
    with pytest.raises(KeyError) as caught:
        names.get("med")
    said = (
        "The adapter 'med' does not exist. Known: law, sql. load_adapter(name, folder) loads one."
    )
    assert str(caught.value) == said
    assert isinstance(caught.value, AdapterNotFound)
    assert caught.value.known == ("law", "sql")


def test_reload_changes_the_digest_and_the_generation(root):
    names = registry(root)
    first = names.load("a", "sql")
    with pytest.raises(AdapterExists, match="'a' is loaded already"):
        names.load("a", "law")
    assert names.get("a") is first
    second = names.load("a", "law", replace=True)
    assert second.digest != first.digest
    assert second.generation > first.generation
    assert names.knows_digest(second.digest)
    assert not names.knows_digest(first.digest)
    # New weights under the same path are other weights, too.
    shutil.rmtree(root / "law")
    cases.write_adapter(root / "law", cases.dense_tensors(seed=5))
    third = names.load("a", "law", replace=True)
    assert third.digest not in (first.digest, second.digest)
    # The same files give the same digest, but still another generation.
    again = names.load("a", "law", replace=True)
    assert again.digest == third.digest
    assert again.generation > third.generation
    before = names.generation
    names.unload("a")
    assert names.generation > before


def test_a_refused_reload_leaves_the_old_one(root):
    names = registry(root)
    first = names.load("a", "sql")
    generation = names.generation
    with pytest.raises(AdapterRejected, match=r"Adapter 'a': .*has rank 3, the config says 2"):
        names.load("a", "broken", replace=True)
    assert names.get("a") is first
    assert names.generation == generation


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "a/b", "a,b", "a b", "../sql", "a\0", "a\n", "é", "x" * 65]
)
def test_bad_names(root, name):
    with pytest.raises(AdapterRejected, match="is not 1 to 64 letters"):
        registry(root).load(name, "sql")
    with pytest.raises(AdapterNotFound):
        registry(root).resolve(name)


def test_the_base_name_is_taken(root):
    cases.write_adapter(root / "base", cases.dense_tensors())
    with pytest.raises(AdapterRejected, match="'base' is the base model's"):
        registry(root).load("base", "sql")
    with pytest.raises(AdapterNotFound):
        registry(root).resolve("base")
    for base, name in (("base", "base@v1"), ("base@v1", "base@v1")):
        with pytest.raises(AdapterRejected, match="'base@v1' is the base model's"):
            AdapterRegistry(cases.llama(), base_names=(base,), lora_dir=root).load(name, "sql")


def test_client_paths_stay_inside_the_root(root):
    names = registry(root)
    (root / "link").symlink_to(root.parent / "secret")
    (root / "half").mkdir()
    shutil.copy(root.parent / "secret" / "adapter_config.json", root / "half")
    (root / "half" / "adapter_model.safetensors").symlink_to(
        root.parent / "secret" / "adapter_model.safetensors"
    )
    outside = ["../secret", str(root.parent / "secret"), "link", "half", "sql/../../secret", "/"]
    for path in outside:
        with pytest.raises(AdapterRejected, match="outside of the adapter directory") as caught:
            names.load("a", path)
        assert str(root.parent) not in str(caught.value)
    for path in ("a\0b", "x" * 5000):
        with pytest.raises((AdapterRejected, AdapterNotFound)):
            names.load("a", path)
    assert names.entries() == ()
    assert names.load("a", str(root / "sql")).path == "sql"  # absolute, but inside
    assert names.load("b", "law/../sql").path == "sql"
    assert names.load("c", root.parent / "secret", confined=False).path == "secret"


def test_without_a_root_clients_cannot_load(root):
    names = registry(None)
    with pytest.raises(AdapterRejected, match="needs an adapter directory"):
        names.load("a", str(root / "sql"))
    with pytest.raises(AdapterNotFound):
        names.resolve("sql")
    assert names.load("a", root / "sql", confined=False).name == "a"


def test_missing_folder_is_not_found(root):
    with pytest.raises(AdapterNotFound, match="'a' was not found: there is no folder 'none'"):
        registry(root).load("a", "none")


def test_resolve_loads_on_first_use(root):
    names = registry(root)
    with pytest.raises(AdapterNotFound):
        names.resolve("none")
    entry = names.resolve("sql")
    assert entry.path == "sql"
    assert names.resolve("sql") is entry


def test_resolve_by_many_threads_loads_once(root):
    names, found = registry(root, loads_per_minute=1), []
    threads = [threading.Thread(target=lambda: found.append(names.resolve("sql"))) for _ in "12345"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 5
    assert len(set(map(id, found))) == 1


def test_a_refused_folder_is_not_read_again_at_once(root):
    clock = Clock()
    names = AdapterRegistry(cases.llama(), lora_dir=root, clock=clock)
    for _ in range(2):
        with pytest.raises(AdapterRejected, match="has rank 3"):
            names.resolve("broken")
        shutil.rmtree(root / "broken", ignore_errors=True)
        cases.write_adapter(root / "broken", cases.dense_tensors())
    clock.now += 11
    assert names.resolve("broken").report.max_rank == 2


def test_the_operators_folders_are_published_in_their_order(root):
    names = registry(root, loads_per_minute=1)
    names.load_all({f"a{n}": root / ("sql", "law")[n % 2] for n in range(20)}, ["a7"])
    assert [entry.name for entry in names.entries() if entry.pinned] == ["a7"]
    entries = names.entries()
    assert {entry.name for entry in entries} == {f"a{n}" for n in range(20)}
    assert [names.get(f"a{n}").generation for n in range(20)] == list(range(1, 21))
    assert {entry.path for entry in entries} == {"sql", "law"}
    assert names.get("a2").digest == names.get("a0").digest != names.get("a1").digest
    assert names.get("a1").folder == str((root / "law").resolve())


def test_a_bad_folder_among_the_operators_is_named_and_those_before_it_stay(root):
    names = registry(root, max_adapters=3)
    with pytest.raises(AdapterRejected, match="broken"):
        names.load_all({"a": root / "sql", "broken": root / "broken", "b": root / "law"})
    assert [entry.name for entry in names.entries()] == ["a"]
    for more, error in (({"base": root / "sql"}, "the base model's"), ({"a": root / "sql"}, "'a'")):
        with pytest.raises((AdapterRejected, AdapterExists), match=error):
            names.load_all(more)
    with pytest.raises(AdapterRejected, match="max_adapters=3"):
        names.load_all({f"b{n}": root / "sql" for n in range(5)})
    assert len(names.entries()) == 3


def test_loads_per_minute(root):
    clock = Clock()
    names = AdapterRegistry(
        cases.llama(), lora_dir=root, clock=clock, limits=RegistryLimits(loads_per_minute=2)
    )
    names.load("a", "sql")
    names.load("b", "sql")
    with pytest.raises(AdapterRejected, match="More than 2 adapter loads in one minute"):
        names.load("c", "sql")
    for number in range(3):  # a program may load its own folders as fast as it can
        names.load(f"own-{number}", root / "sql", confined=False)
    clock.now += 60
    names.load("c", "sql")


def test_limits_name_both_numbers(root):
    size = registry(root).load("a", "sql").report.weight_bytes
    names = registry(root, max_total_bytes=2 * size - 1)
    names.load("a", "sql")
    names.load("same", "sql")  # the same weights count once
    names.load("b", "law")
    assert loaded(names) == ["b"]
    with pytest.raises(
        AdapterRejected, match=rf"{size} bytes, .*max_total_adapter_bytes={size - 1}"
    ):
        registry(root, max_total_bytes=size - 1).load("a", "sql")
    assert names.load("a", "sql", replace=True).name == "a"
    names = registry(root, max_total_bytes=size)
    names.load("a", "sql")
    names.load("a", "law", replace=True)  # the old weights go
    names = registry(root, max_adapters=1)
    names.load("a", "sql")
    with pytest.raises(AdapterRejected, match="max_adapters=1; unload one"):
        names.load("b", "sql")
    assert names.load("a", "law", replace=True).name == "a"
    with pytest.raises(AdapterRejected, match=r"rank 2 .* limit of 1"):
        registry(root, max_rank=1).load("a", "sql")
    with pytest.raises(AdapterRejected, match="bytes, at most 64 allowed"):
        registry(root, max_file_bytes=64).load("a", "sql")


@settings(max_examples=150, deadline=None)
@given(data=st.data(), which=st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
def test_damaged_files_are_rejected_or_read_but_never_break_the_registry(data, which):
    with tempfile.TemporaryDirectory() as directory:
        folder = cases.write_adapter(Path(directory) / "a", cases.dense_tensors())
        content = bytearray((folder / which).read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, min(len(content) - 1, 400)))
            content[place] = data.draw(st.integers(0, 255))
        (folder / which).write_bytes(content)
        names = registry(directory)
        try:
            names.load("a", "a")
        except AdapterRejected:
            assert names.entries() == ()
        else:
            assert names.get("a").report.max_rank == 2


def test_a_repeated_load_takes_only_the_same_files_and_is_not_limited(root):
    names = registry(root, loads_per_minute=1)
    first = names.load("a", "sql")
    again = names.load("a", "sql", replace=True, digest=first.digest)
    assert again.digest == first.digest
    with pytest.raises(AdapterRejected, match="its files have changed"):
        names.load("b", "law", digest=first.digest)
    assert [entry.name for entry in names.entries()] == ["a"]


def test_a_refused_name_can_be_unloaded(root):
    names = registry(root)
    names.refuse("sql", "Its files have changed.")
    names.refuse("sql@v1", "Its files have changed.")
    assert names.unload("sql") is None
    assert names.unload("sql@v1") is None
    assert names.resolve("sql").name == "sql", "a folder that is read on its first use"
    for name in ("sql@v1", "nobody"):
        with pytest.raises(AdapterNotFound):
            names.unload(name)


def test_a_refused_name_comes_back_only_by_a_load(root):
    names = registry(root)
    for name in ("sql", "sql@v1"):  # a version is never read on its first use
        names.refuse(name, "Its files have changed.")
        with pytest.raises(AdapterRejected, match="Its files have changed"):
            names.resolve(name)
    names.load("sql", "sql")
    names.unload("sql")
    assert names.resolve("sql").name == "sql"
