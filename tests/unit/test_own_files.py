"""Folders that other users may change are refused; files that are damaged do not count."""

import os
import stat

import pytest

from lora_jax import own_files
from lora_jax.own_files import (
    UnsafeFolderError,
    is_unchanged,
    is_whole,
    own_folder,
    publish,
    write_whole,
)


def published(folder):
    (folder / "part").write_bytes(b"library" * 100)
    publish(folder / "part", folder / "a.so")
    return folder / "a.so"


def give_away(path, monkeypatch):
    """Let a file or folder be another user's."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(own_files.os, "geteuid", lambda: os.getuid() + 1)


def test_missing_folders_are_made_for_this_user_alone(tmp_path):
    before = os.umask(0o002)
    try:
        made = own_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (made, made.parent)] == [0o700, 0o700]
    assert own_folder(made) == made


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o722])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    said = rf"other users may write .*/a \(mode {mode:04o}\): run chmod go-w .*/a, or name another"
    with pytest.raises(UnsafeFolderError, match=said):
        own_folder(tmp_path / "a")


def test_so_is_a_folder_below_it_unless_it_is_sticky(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(UnsafeFolderError, match=r"/a \(mode 0777\)"):
        own_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "a").chmod(0o1777)
    assert own_folder(tmp_path / "a" / "b").is_dir()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    give_away(tmp_path / "a", monkeypatch)
    with pytest.raises(UnsafeFolderError, match=r"\(mode \d+\) belongs to uid \d+, not to uid"):
        own_folder(tmp_path / "a" / "b")


def test_links_are_followed_before_anything_is_checked(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(UnsafeFolderError, match="/open"):
        own_folder(tmp_path / "link")
    (tmp_path / "open").chmod(0o755)
    assert own_folder(tmp_path / "link") == tmp_path / "open"


def test_a_file_in_the_way_is_no_folder(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(NotADirectoryError):
        own_folder(tmp_path / "a" / "b")


def test_a_published_file_is_whole(tmp_path):
    path = published(tmp_path)
    assert is_whole(path)
    assert path.read_bytes() == b"library" * 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.so", "a.so.sha256"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}


def damage(path, how):
    data = path.read_bytes()
    if how == "no digest":
        path.with_name("a.so.sha256").unlink()
    elif how == "empty digest":
        path.with_name("a.so.sha256").write_text("")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "a link":
        path.rename(path.with_name("other"))
        path.symlink_to(path.with_name("other"))
    elif how == "others may write":
        path.chmod(0o622)
    else:
        path.write_bytes({"half": data[:350], "empty": b"", "a bit": data[:-1] + b"Y"}[how])


@pytest.mark.parametrize(
    "how",
    [
        *("half", "empty", "a bit", "no digest", "empty digest"),
        *("a pipe", "a link", "others may write"),
    ],
)
def test_a_damaged_file_does_not_count(tmp_path, how):
    path = published(tmp_path)
    damage(path, how)
    assert not is_whole(path)
    path.unlink()
    assert is_whole(published(tmp_path))


def test_neither_does_a_file_of_another_user(tmp_path, monkeypatch):
    path = published(tmp_path)
    give_away(path, monkeypatch)
    assert not is_whole(path)


def test_an_unchanged_file_may_be_another_users(tmp_path, monkeypatch):
    path = published(tmp_path)
    give_away(path, monkeypatch)
    assert is_unchanged(path)
    damage(path, "half")
    assert not is_unchanged(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(own_files.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(tmp_path / "a", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"
