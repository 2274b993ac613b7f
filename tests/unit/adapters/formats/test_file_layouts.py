"""Files of a known layout: the same adapter as without it, and the same errors."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.file_layouts import FileLayouts
from lora_jax.adapters.weights import AdapterWeights

CATALOGUE = cases.llama()
# Layers and experts stacked of several tensors, or tensors that no matrix has all of.
WITHOUT = ("llama-head", "mixtral-legacy", "per_expert")


def read(folder: Path, layouts: FileLayouts | None = None, catalogue=CATALOGUE) -> AdapterWeights:
    return peft_format.read(folder, catalogue, layouts=layouts)


@pytest.fixture
def parsed(monkeypatch) -> list[Path]:
    """Files that were read without a layout since the list was cleared."""
    files, real = [], peft_format._read

    def noted(*given):
        files.append(given)
        return real(*given)

    monkeypatch.setattr(peft_format, "_read", noted)
    return files


def assert_same(got: AdapterWeights, want: AdapterWeights) -> None:
    """Raise AssertionError unless two adapters are equal in every bit and in what is known."""
    assert got.report == want.report
    assert list(got.sites) == list(want.sites)
    for key, site in want.sites.items():
        assert got.sites[key].scaling == site.scaling
        for one, other in ((got.sites[key].a, site.a), (got.sites[key].b, site.b)):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    assert (got.demand, got.rows_by_width()) == (want.demand, want.rows_by_width())
    for name in ("modules", "layers", "matrices", "shapes", "scaling"):
        np.testing.assert_array_equal(*(getattr(w.site_columns, name) for w in (got, want)))
    assert len(got.host_runs) == len(want.host_runs)
    for one, other in zip(got.host_runs, want.host_runs, strict=True):
        assert (one.width, one.numbers, one.counts) == (other.width, other.numbers, other.counts)
        np.testing.assert_array_equal(one.rows, other.rows)
    assert got.in_one_block() is got
    assert want.in_one_block() is want


def test_every_fixture_is_the_same_by_its_layout(parsed):
    for folder in cases.FOLDERS:
        layouts, catalogue = FileLayouts(), cases.catalogue_of(folder)
        path = cases.FIXTURES / folder
        want = read(path, catalogue=catalogue)
        assert_same(read(path, layouts, catalogue), want)
        parsed.clear()
        assert_same(read(path, layouts, catalogue), want)
        assert bool(parsed) == folder.endswith(WITHOUT), folder


@pytest.fixture
def layouts(tmp_path) -> FileLayouts:
    """The layout of a file of `cases.dense_tensors`."""
    layouts = FileLayouts()
    read(cases.write_adapter(tmp_path / "first", cases.dense_tensors()), layouts)
    return layouts


def test_another_file_of_the_layout_has_its_own_values_and_report(tmp_path, layouts, parsed):
    config = {"revision": "b", "lora_dropout": 0.1}
    folder = cases.write_adapter(tmp_path / "second", cases.dense_tensors(seed=1), config)
    got = read(folder, layouts)
    assert not parsed
    want = read(folder)
    assert got.report.folder == "second"
    assert got.digest != read(tmp_path / "first").digest
    assert_same(got, want)
    for form in (AdapterWeights.in_8_bits, lambda one: one.narrowed(np.dtype(np.float16))):
        assert_same(form(got).in_one_block(), form(want).in_one_block())


@pytest.mark.parametrize(
    "config",
    [{"lora_alpha": 7}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}, {"base": None}],
)
def test_a_config_of_another_meaning_has_another_layout(tmp_path, layouts, parsed, config):
    if "base" in config:  # says nothing of the tensors, but the report has it
        config = {"base_model_name_or_path": "another"}
    folder = cases.write_adapter(tmp_path / "second", cases.dense_tensors(), config)
    got = read(folder, layouts)
    assert parsed
    assert_same(got, read(folder))


def test_the_order_of_patterns_is_a_meaning(tmp_path, layouts):
    folders = []
    for number, order in enumerate((("q_proj", "self_attn.*"), ("self_attn.*", "q_proj"))):
        config = {"alpha_pattern": {name: 3.0 + len(name) for name in order}}
        folder = tmp_path / str(number)
        folders.append(cases.write_adapter(folder, cases.dense_tensors(), config))
    for folder in folders:
        assert_same(read(folder, layouts), read(folder))


def test_values_that_are_not_finite_are_told_as_without_a_layout(tmp_path, layouts):
    name, tensors = "model.layers.0.self_attn.v_proj.lora_B.weight", cases.dense_tensors()
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        tensors[name][3, 1] = bad
        folder = cases.write_adapter(tmp_path / "bad", tensors)
        with pytest.raises(ValueError, match=rf"{name} has values that are NaN or infinite"):
            read(folder, layouts)


@pytest.mark.parametrize("change", [-4, 4])
def test_a_file_of_another_size_is_refused_as_without_a_layout(tmp_path, layouts, change):
    path = tmp_path / "first" / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(ValueError, match=r"truncated|after the last tensor") as found:
        read(tmp_path / "first", layouts)
    with pytest.raises(ValueError, match=r"truncated|after the last tensor") as wanted:
        read(tmp_path / "first")
    assert str(found.value) == str(wanted.value)


def test_a_file_that_changes_while_it_is_read_is_read_without_a_layout(
    tmp_path, layouts, parsed, monkeypatch
):
    """Its header is the known one when the search looks, and another one when it has been read."""
    path = tmp_path / "first" / "adapter_model.safetensors"
    other = cases.write_adapter(tmp_path / "other", cases.dense_tensors(("q_proj", "k_proj")))
    changed, real = (other / path.name).read_bytes(), os.preadv
    assert len(changed) == path.stat().st_size

    def late(handle, buffers, start):
        if os.fstat(handle).st_size == len(changed):
            path.write_bytes(changed)
        return real(handle, buffers, start)

    monkeypatch.setattr(os, "preadv", late)
    got = read(tmp_path / "first", layouts)
    assert parsed
    assert got.sites.keys() == {("q_proj", 0), ("k_proj", 0)}
    monkeypatch.undo()
    cases.write_adapter(tmp_path / "first", cases.dense_tensors())
    assert_same(read(tmp_path / "first", layouts), read(tmp_path / "first"))


@pytest.mark.parametrize("left", [0, 100, -4])
def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(
    tmp_path, layouts, monkeypatch, left
):
    path, real = tmp_path / "first" / "adapter_model.safetensors", os.preadv
    whole = path.stat().st_size

    def late(handle, buffers, start):
        if os.fstat(handle).st_size == whole:
            os.truncate(path, left % whole)
        return real(handle, buffers, start)

    monkeypatch.setattr(os, "preadv", late)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: (truncated|not a safe)"):
        read(tmp_path / "first", layouts)


def test_gate_and_up_that_are_apart_have_half_the_rank(tmp_path, parsed):
    """Whether they are is a matter of values: one header has two layouts."""
    source, catalogue = cases.FIXTURES / "0.21.2-mixtral-both", cases.catalogue_of("a-mixtral-b")
    layouts = FileLayouts()
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(n for n in tensors if n.endswith("base_layer.lora_B.weight"))
    experts, half = 3, len(tensors[name]) // 2
    by_rank = tensors[name].reshape(2 * half, -1, experts)
    rank = by_rank.shape[1] // 2
    by_rank[:half, rank:] = by_rank[half:, :rank] = 0
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    save_file(tensors, apart / "adapter_model.safetensors", {"format": "pt"})
    joined = read(source, layouts, catalogue)
    want = read(apart, catalogue=catalogue)
    parsed.clear()
    assert_same(read(apart, layouts, catalogue), want)
    assert parsed
    key = ("experts.gate_proj", 0)
    assert want.sites[key].rank == joined.sites[key].rank // 2


def test_another_catalogue_has_layouts_of_its_own(tmp_path, layouts, parsed):
    read(tmp_path / "first", layouts, cases.llama())
    assert parsed


def test_layouts_used_last_are_kept(tmp_path, parsed):
    layouts, folders = FileLayouts(most=2), []
    for rank in (1, 2, 3):
        tensors, config = cases.dense_tensors(rank=rank), {"r": rank}
        folders.append(cases.write_adapter(tmp_path / str(rank), tensors, config))
    read(folders[0], layouts)
    read(folders[1], layouts)
    read(folders[0], layouts)  # used last but one
    read(folders[2], layouts)
    parsed.clear()
    for folder in (folders[0], folders[2]):
        read(folder, layouts)
    assert not parsed
    read(folders[1], layouts)
    assert parsed
