"""Folders of adapters: confined, checked before anything is published, named without their path."""

import itertools

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters import reader
from lora_jax.adapters.adapter_folders import AdapterFolders, check_folders, check_tensors
from lora_jax.adapters.entries import RegistryLimits
from lora_jax.adapters.registry_errors import AdapterNotFound, AdapterRejected


@pytest.fixture
def root(tmp_path):
    cases.write_adapter(tmp_path / "root" / "sql", cases.dense_tensors())
    cases.write_adapter(tmp_path / "secret", cases.dense_tensors(seed=9))
    return tmp_path / "root"


def folders(root, *, check=None, keep=None) -> AdapterFolders:
    sources = cases.llama(), ("base",), root, RegistryLimits()
    return AdapterFolders(*sources, check=check, keep=keep, read=reader.read)


def read(made, path, *, confined=True):
    seen = []
    weights = made.read("a", made.folder(path, confined), confined, seen.append)
    assert len(seen) == 1
    return weights


def test_an_entry_shows_its_path_below_the_root_or_its_folder_s_name_only(root):
    made = folders(root)
    entry = made.entry("a", read(made, "sql"), root / "sql", True, explicit=False)
    assert (entry.path, entry.generation, entry.explicit) == ("sql", 0, False)
    weights = read(made, root.parent / "secret", confined=False)
    entry = made.entry("b", weights, root.parent / "secret", False, pinned=True)
    assert (entry.path, entry.digest, entry.pinned) == ("secret", weights.digest, True)
    again = made.entry("b", weights, root.parent / "secret", False, known=entry.evicted(7))
    assert (again.path, again.folder, again.weights) == (entry.path, entry.folder, weights)


def test_only_folders_of_the_root_are_there(root):
    made = folders(root)
    assert (made.has_root, made.has("sql"), made.has("none")) == (True, True, False)
    with pytest.raises(AdapterRejected, match="outside of the adapter directory: give a"):
        read(made, "../secret")
    with pytest.raises(FileNotFoundError, match="there is no folder 'none'"):
        read(made, "none")
    made = folders(None)
    assert (made.has_root, made.has("sql")) == (False, False)
    with pytest.raises(AdapterRejected, match="needs an adapter directory"):
        made.folder("sql", True)


def test_what_can_never_run_is_refused_as_it_would_be_kept(root):
    kept = []

    def keep(weights):
        kept.append(weights)
        return weights

    def check(weights):
        assert kept[0] is weights
        raise ValueError("too big for the device.")

    with pytest.raises(AdapterRejected, match="Adapter 'a': too big for the device"):
        read(folders(root, check=check, keep=keep), "sql")


def test_only_safetensors(root):
    folder = root / "sql"
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterRejected, match=r"adapter_model\.bin is not read: unpickling"):
        read(folders(root), "sql")


def test_a_refusal_is_one_line_of_the_log_with_its_place(root, caplog):
    def check(weights):
        raise ValueError("too\nbig")

    with pytest.raises(AdapterRejected):
        read(folders(root, check=check), "sql")
    (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("adapter_folders")]
    assert line == f"Adapter a ({str(root / 'sql')!r}) was not loaded: too big"


def test_an_unreadable_file_is_a_refusal_without_its_path(root, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", fail)
    with pytest.raises(AdapterRejected, match="Adapter 'a': Permission denied") as caught:
        read(folders(root), "sql")
    assert str(root) not in str(caught.value)


def test_folders_are_checked_by_name_before_a_model_is_there(root):
    limits = RegistryLimits(max_rank=1)
    check_folders({"sql": root / "sql"}, RegistryLimits())
    with pytest.raises(AdapterNotFound, match="'sql' was not found: there is no folder"):
        check_folders({"sql": root / "none"}, limits)
    with pytest.raises(AdapterRejected, match=r"Adapter 'sql': .* above the limit of 1"):
        check_folders({"sql": root / "sql"}, limits)
    with pytest.raises(AdapterRejected, match=r"adapter name 'a b' is not"):
        check_folders({"a b": root / "sql"}, limits)


def test_of_adapters_that_look_the_same_one_is_looked_at(tmp_path, monkeypatch):
    looked, look = [], reader.check_fits
    monkeypatch.setattr(reader, "check_fits", lambda path, *a, **k: looked.append(path.name))
    tensors = cases.dense_tensors()
    wide = {name: np.pad(t, ((0, 0), (0, 1))) for name, t in tensors.items()}
    cases.write_adapter(tmp_path / "a", tensors)
    cases.write_adapter(tmp_path / "b", {name: t + 1 for name, t in tensors.items()})
    cases.write_adapter(tmp_path / "other config", tensors, {"lora_alpha": 3})
    cases.write_adapter(tmp_path / "other shapes", wide)
    cases.write_adapter(tmp_path / "cut", tensors)
    file = tmp_path / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "none").mkdir()
    given = {path.name: path for path in sorted(tmp_path.iterdir())}
    check_tensors(given | {"none again": tmp_path / "none"}, RegistryLimits(), cases.llama(), ())
    assert sorted(looked) == ["a", "cut", "none", "none", "other config", "other shapes"]
    monkeypatch.setattr(reader, "check_fits", look)
    wrong = {"a": tmp_path / "a", "w": tmp_path / "other shapes"}
    with pytest.raises(AdapterRejected, match=r"'w': adapter_model\.safetensors"):
        check_tensors(wrong, RegistryLimits(), cases.llama(), ())


def test_looks_at_headers_end_after_a_time_and_not_after_a_count(root, monkeypatch, caplog):
    looked, clock = [], itertools.count()
    monkeypatch.setattr(reader, "check_fits", lambda path, *a, **k: looked.append(path.name))
    monkeypatch.setattr("lora_jax.adapters.adapter_folders.time.monotonic", lambda: next(clock))
    given = {f"a{i}": root / f"none{i}" for i in range(100)}
    check_tensors(given, RegistryLimits(), cases.llama(), (), most_s=1000)
    assert len(looked) == 100
    with caplog.at_level("INFO"):
        check_tensors(given, RegistryLimits(), cases.llama(), (), most_s=40)
    assert len(looked) == 140
    assert "The tensors of 40 of 100 adapters fit; loads check the others." in caplog.text
