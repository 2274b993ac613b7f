"""Folders for sockets: where TMPDIR says, unless a socket's path would be too long there."""

import socket
import stat

import pytest

from serving.runtime import socket_folder as module
from serving.runtime.socket_folder import socket_folder


@pytest.mark.parametrize(("length", "is_short"), [(1, False), (120, True)])
def test_a_socket_can_be_bound_however_long_the_folder_of_temporary_files_is(
    tmp_path, monkeypatch, length, is_short
):
    temporary, short = tmp_path / ("t" * length), tmp_path / "s"
    temporary.mkdir()
    short.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(module, "_LONGEST_PATH", len(str(tmp_path)) + 60)
    monkeypatch.setattr(module, "_SHORT", str(short))
    folder = socket_folder("lora-")
    assert folder.parent == (short if is_short else temporary)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(temporary.iterdir()) == ([] if is_short else [folder])


def test_the_longest_path_is_the_longest_that_the_system_takes():
    longest = "/" + "x" * (module._LONGEST_PATH - 1)
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(FileNotFoundError):
        sock.connect(longest)
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="path too long"):
        sock.connect(longest + "xx")


def test_where_no_folder_is_short_enough_the_error_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_LONGEST_PATH", 30)
    monkeypatch.setattr(module, "_SHORT", str(tmp_path / "none"))
    with pytest.raises(ConnectionError, match=r"at most 30 bytes: .* is too long.*Set TMPDIR to a"):
        socket_folder("lora-")
    assert list(tmp_path.iterdir()) == []
