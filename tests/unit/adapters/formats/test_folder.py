"""Opening an adapter's files: hashes of what was read, and no way out of the root."""

import hashlib
import os

import numpy as np
import pytest

from lora_jax.adapters.formats import folder as folder_module
from lora_jax.adapters.formats.folder import AdapterFolder


@pytest.fixture
def root(tmp_path):
    """A root with one adapter, and a secret beside the root."""
    (tmp_path / "root" / "good").mkdir(parents=True)
    (tmp_path / "root" / "good" / "a.json").write_bytes(b"hello")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "a.json").write_bytes(b"secret")
    return tmp_path / "root"


def test_hashes_are_of_what_was_read(root):
    folder = AdapterFolder(root / "good", root)
    assert folder.name == "good"
    assert folder.files() == ("a.json",)
    assert folder.read("a.json", 5) == b"hello"
    assert folder.hashes == {"a.json": hashlib.sha256(b"hello").hexdigest()}
    assert folder.num_bytes == 5
    before = folder.digest()
    (root / "good" / "b.json").write_bytes(b"more")
    folder.read("b.json", 5)
    assert folder.digest() != before
    assert folder.files() == ("a.json",), "a folder is listed once for one read"


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_large_file_is_hashed_by_pieces(root, monkeypatch, over):
    """Up to one piece the hash is the file's sha256, which other tools give, too."""
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 1000)
    for pieces in (1, 3):
        data = np.random.default_rng(over + 1).bytes(1000 * pieces + over)
        (root / "good" / "b").write_bytes(data)
        folder = AdapterFolder(root / "good")
        assert folder.view("b", 10_000) == data
        parts = [data[start : start + 1000] for start in range(0, len(data), 1000)]
        digests = b"".join(hashlib.sha256(part).digest() for part in parts)
        by_pieces = f"pieces-{hashlib.sha256(digests).hexdigest()}"
        whole = hashlib.sha256(data).hexdigest()
        assert folder.hashes == {"b": whole if len(parts) == 1 else by_pieces}


def test_a_file_that_becomes_shorter_is_read_to_its_end(root, monkeypatch):
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 1000)
    file, real = root / "good" / "b", os.fstat
    for left in (0, 999, 1000, 1001, 2500):
        data = np.random.default_rng(left).bytes(3500)
        file.write_bytes(data)

        def shrunk(handle, left=left):
            status = real(handle)
            os.truncate(file, left)
            return status

        monkeypatch.setattr(os, "fstat", shrunk)
        folder = AdapterFolder(root / "good")
        assert folder.view("b", 10_000) == data[:left]
        monkeypatch.setattr(os, "fstat", real)
        again = AdapterFolder(root / "good")
        assert again.view("b", 10_000) == data[:left]
        assert folder.hashes == again.hashes
        assert folder.num_bytes == left


@pytest.mark.parametrize("path", ["../secret", "good/../../secret", "/etc", "..", "missing/../.."])
def test_paths_outside_are_refused_before_anything_is_said_about_them(root, path):
    with pytest.raises(ValueError, match="leads outside of the adapter directory") as caught:
        AdapterFolder(root / path, root)
    assert str(root) not in str(caught.value)


def test_links_out_of_the_root_are_refused(root):
    (root / "link").symlink_to(root.parent / "secret")
    with pytest.raises(ValueError, match="leads outside"):
        AdapterFolder(root / "link", root)
    (root / "good" / "b.json").symlink_to(root.parent / "secret" / "a.json")
    with pytest.raises(ValueError, match=r"b\.json leads outside"):
        AdapterFolder(root / "good", root).read("b.json", 100)
    # An operator's own path is not confined, nor are links inside the root refused.
    assert AdapterFolder(root / "link").read("a.json", 100) == b"secret"
    (root / "inner").symlink_to(root / "good")
    assert AdapterFolder(root / "inner", root).read("a.json", 100) == b"hello"


def test_a_link_that_is_turned_round_after_opening_is_refused(root, monkeypatch):
    """What was opened outside stays refused when the name leads inside a moment later."""
    (root / "good" / "b.json").symlink_to(root.parent / "secret" / "a.json")
    folder, real = AdapterFolder(root / "good", root), os.path.realpath

    def turned(path):
        os.unlink(root / "good" / "b.json")
        os.symlink(root / "good" / "a.json", root / "good" / "b.json")
        return real(path)

    monkeypatch.setattr("os.path.realpath", turned)
    with pytest.raises(ValueError, match=r"b\.json leads outside"):
        folder.read("b.json", 100)


def test_a_root_that_is_itself_a_link_works(root, tmp_path):
    (tmp_path / "alias").symlink_to(root)
    alias = tmp_path / "alias"
    assert AdapterFolder(alias / "good", alias).read("a.json", 100) == b"hello"


def test_a_sibling_whose_name_starts_like_the_root_is_outside(root):
    (root.parent / "root2").mkdir()
    with pytest.raises(ValueError, match="leads outside"):
        AdapterFolder(root / ".." / "root2", root)


def test_what_is_not_a_plain_file_is_refused_without_waiting(root):
    os.mkfifo(root / "good" / "pipe")
    (root / "good" / "dir").mkdir()
    folder = AdapterFolder(root / "good", root)
    for name in ("pipe", "dir"):
        with pytest.raises(ValueError, match=f"{name} is not a plain file"):
            folder.read(name, 100)
    with pytest.raises(ValueError, match="none cannot be opened"):
        folder.read("none", 100)


def test_size_is_capped_before_reading(root):
    with pytest.raises(ValueError, match=r"a\.json has 5 bytes, at most 4"):
        AdapterFolder(root / "good", root).read("a.json", 4)


def test_missing_folder(root):
    with pytest.raises(FileNotFoundError, match="no folder 'none'"):
        AdapterFolder(root / "none", root)


def test_pickles_are_listed(root):
    for name in ("adapter_model.bin", "x.pt", "y.safetensors"):
        (root / "good" / name).write_bytes(b"")
    assert AdapterFolder(root / "good").pickles() == ("adapter_model.bin", "x.pt")


def test_the_kernel_says_where_an_opened_file_lies(root, monkeypatch):
    """To follow the links of a path takes as many calls as it has parts, for each file."""
    folder = AdapterFolder(root / "good", root)

    def followed(path):
        raise AssertionError(path)

    with monkeypatch.context() as only_here:
        only_here.setattr("os.path.realpath", followed)
        assert folder.files() == ("a.json",)
        assert folder.read("a.json", 100) == b"hello"

    def nowhere(path):
        raise OSError(path)

    monkeypatch.setattr("os.readlink", nowhere)  # as without /proc
    assert folder.files() == ("a.json",)
    assert folder.read("a.json", 100) == b"hello"


def test_a_folder_that_becomes_a_link_outwards_is_not_listed(root):
    folder = AdapterFolder(root / "good", root)
    (root / "good").rename(root / "before")
    (root / "good").symlink_to(root.parent / "secret")
    with pytest.raises(ValueError, match="leads outside"):
        folder.files()
