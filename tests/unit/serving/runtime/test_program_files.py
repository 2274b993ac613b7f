"""A folder of programs: what is damaged is not handed out, what is old is removed."""

import hashlib
import os
import stat

import pytest

from serving.runtime import program_files
from serving.runtime.program_files import ProgramFiles, step_keys

DIGEST = 32


def test_a_program_is_kept_for_this_user_alone(tmp_path):
    ProgramFiles(tmp_path, 1000).put("key", b"program")
    files = list(tmp_path.iterdir())
    assert [stat.S_IMODE(p.stat().st_mode) for p in files] == [0o600]
    assert ProgramFiles(tmp_path, 1000).get("key") == b"program"
    assert ProgramFiles(tmp_path, 1000).get("other") is None


@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: b"", lambda d: d[:-1] + b"?"])
def test_a_damaged_program_is_removed_and_written_again(tmp_path, damage, caplog):
    files = ProgramFiles(tmp_path, 1000)
    files.put("key", b"program")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert files.get("key") is None
    assert f"{path} is damaged" in caplog.text
    assert not path.exists()
    files.put("key", b"program")
    assert files.get("key") == b"program"


def test_a_file_of_another_program_is_not_handed_out(tmp_path, caplog):
    files = ProgramFiles(tmp_path, 1000)
    for key in ("key", "other"):
        files.put(key, key.encode())
    (tmp_path / "other.compiled").replace(tmp_path / "key.compiled")
    assert files.get("key") is None
    assert "holds another program" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_is_no_program(tmp_path, caplog):
    (tmp_path / "key.compiled").mkdir()
    assert ProgramFiles(tmp_path, 1000).get("key") is None
    assert "cannot be read" in caplog.text


def test_programs_that_this_thread_finds_are_told(tmp_path):
    files = ProgramFiles(tmp_path, 1000)
    files.put("key", b"program")
    files.get("key")
    with files.watched() as found:
        files.get("other")
        assert found == []
        files.get("key")
    files.get("key")
    assert found == [b"program"]


def test_what_was_used_longest_ago_is_removed_first(tmp_path):
    files = ProgramFiles(tmp_path, 3 * (10 + DIGEST))
    for number, name in enumerate("abc"):
        files.put(name, bytes(10))
        os.utime(tmp_path / f"{name}.compiled", (number, number))
    (tmp_path / "of-jax-itself-cache").write_bytes(b"x")  # of an older release
    os.utime(tmp_path / "of-jax-itself-cache", (0, 0))
    assert files.get("a") is not None  # used now
    files.put("d", bytes(10))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.compiled", "c.compiled", "d.compiled"]


def test_a_program_larger_than_the_bound_is_not_kept(tmp_path):
    ProgramFiles(tmp_path, 40).put("key", bytes(10))
    assert not list(tmp_path.iterdir())


def test_programs_are_not_read_meanwhile(tmp_path):
    files = ProgramFiles(tmp_path, 1000)
    files.put("key", b"program")
    with files.unread():
        assert files.get("key") is None
    assert files.get("key") == b"program"


HOSTILE = [
    "../../budgets/planted",
    "/tmp/planted",
    "a" * 63 + "/",
    "A" * 64,
    "a" * 64 + "\n",
    5,
    [[]],
]


def test_another_process_names_steps_by_their_digests_alone(monkeypatch):
    good = [f"{number:064x}" for number in (1, 2)]
    assert step_keys([good[0], *HOSTILE, *good]) == good
    for given in (5, None, "a" * 64, {good[0]: 1}, [[]], []):
        assert step_keys(given) == []
    monkeypatch.setattr(program_files, "_MOST_STEPS", 1)
    assert step_keys(good) == good[:1]


@pytest.mark.parametrize("key", ["../planted", "a/b", "/tmp/planted"])
def test_a_key_that_leaves_the_folder_is_refused(tmp_path, key):
    ProgramFiles(tmp_path, 1000).put("planted", b"code of an attacker")
    (tmp_path / "programs").mkdir()
    files = ProgramFiles(tmp_path / "programs", 1000)
    for use in (files.get, lambda key: files.put(key, b"program")):
        with pytest.raises(ValueError, match="must be a file's name"):
            use(key)


def test_files_that_another_process_removes_meanwhile_do_not_count(tmp_path, monkeypatch, caplog):
    files = ProgramFiles(tmp_path, 10 + DIGEST)
    files.put("a", bytes(10))
    scandir = os.scandir

    class Gone:
        path = str(tmp_path / "gone")

        def stat(self, *, follow_symlinks):
            raise FileNotFoundError(self.path)

    monkeypatch.setattr(program_files.os, "scandir", lambda path: [Gone(), *scandir(path)])
    files.put("b", bytes(10))
    assert [path.name for path in tmp_path.iterdir()] == ["b.compiled"]
    caplog.set_level("DEBUG", program_files.__name__)
    program_files._touch(tmp_path / "gone")
    assert "gone" in caplog.text


def test_a_file_of_an_older_build_is_not_called_damaged(tmp_path, caplog):
    """Its digest was of the program alone, and its name ended in ".program"."""
    value = b"step"
    (tmp_path / "key.program").write_bytes(hashlib.sha256(value).digest() + value)
    assert ProgramFiles(tmp_path, 1 << 20).get("key") is None
    assert not caplog.records
