"""Names of folders in the cache of Hugging Face's hub, and which folder to give."""

import os

import pytest

from lora_jax.hub_folder import folder_name, hint


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models--meta-llama--Llama-3.1-8B/snapshots/d04e59", "Llama-3.1-8B"),
        ("models--org--a--b/snapshots/d04e59", "a--b"),
        ("models--gpt2/snapshots/d04e59", "gpt2"),
        ("models--org--a/d04e59", "d04e59"),
        ("a/snapshots/b", "b"),
        ("a/b", "b"),
    ],
)
def test_a_snapshot_has_the_name_of_its_repository(tmp_path, monkeypatch, folder, name):
    (tmp_path / folder).mkdir(parents=True)
    assert folder_name(tmp_path / folder) == name
    monkeypatch.chdir(tmp_path / folder)
    assert folder_name(".") == name
    (tmp_path / "link").symlink_to(tmp_path / folder)
    assert folder_name(str(tmp_path / "link")) == name


def test_the_newest_snapshot_of_a_repository_is_named(tmp_path):
    repository = tmp_path / "models--org--a"
    for age, name in enumerate(("new", "old")):
        (repository / "snapshots" / name).mkdir(parents=True)
        os.utime(repository / "snapshots" / name, (1000 - age, 1000 - age))
    assert hint(str(repository)) == f"; give a snapshot of it, such as {repository}/snapshots/new"
    assert hint(str(tmp_path)) == ""
    (tmp_path / "models--org--b" / "snapshots").mkdir(parents=True)
    assert hint(str(tmp_path / "models--org--b")) == ""


def test_a_name_on_the_hub_is_told_how_to_become_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "`hf download meta-llama/Llama-3.1-8B` prints" in hint("meta-llama/Llama-3.1-8B")
    for other in ("nowhere", "/a/b", "./a/b", "a/b/c", "../a"):
        assert hint(other) == ""
