"""The folder of budgets goes with its command, or with the next command of the same host."""

import signal
import socket
import subprocess
import sys

import pytest
from support.processes.server_process import ROOT

from serving.cluster import budgets_folder as module
from serving.cluster.budgets_folder import BudgetsFolder

COMMAND = """
import sys
from serving.cluster.budgets_folder import BudgetsFolder
print((made := BudgetsFolder(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""


def test_a_folder_goes_with_its_command_and_not_with_another_ones(tmp_path):
    first, second = BudgetsFolder(tmp_path), BudgetsFolder(tmp_path)
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.close()
    assert second.path.is_dir()
    second.close()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_command_leaves_goes_with_the_next_start_on_its_host(tmp_path, monkeypatch):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", COMMAND, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as killed:
        left = tmp_path / killed.stdout.readline().strip()
        (left / "key").touch()
        living = BudgetsFolder(tmp_path)
        assert left.is_dir()
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
    living.close()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "other/host")
        far = BudgetsFolder(tmp_path)
        assert left.is_dir()  # another host's
        assert far.path.name.startswith("budgets-other_host-")
    again = BudgetsFolder(tmp_path)
    assert not left.exists()
    assert far.path.is_dir()
    for one in (again, far):
        one.close()
    assert not list(tmp_path.iterdir())


def test_what_a_host_of_a_longer_name_leaves_is_not_this_hosts(tmp_path, monkeypatch):
    """Its lock may tell nothing here, as of any other host."""
    for name in ("node-1", "node-0123456789abcdef"):
        lock = tmp_path / f"budgets-{name}-0123456789abcdef.lock"
        lock.touch()
        lock.with_suffix("").mkdir()
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    BudgetsFolder(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("what", ["removed", "replaced", "held"])
def test_a_lock_that_another_command_takes_away_is_not_had(tmp_path, monkeypatch, what):
    """It may take a new folder for one that is left, between the file's making and its lock."""
    lock, flock = tmp_path / "x.lock", module.fcntl.flock

    def other_first(file, how):
        if what == "held":
            raise BlockingIOError
        lock.unlink()
        if what == "replaced":
            lock.touch()
        flock(file, how)

    monkeypatch.setattr(module.fcntl, "flock", other_first)
    assert module._held(lock) is None
    monkeypatch.undo()
    module._held(lock).close()


def test_what_cannot_be_removed_stops_no_start(tmp_path, monkeypatch):
    left = BudgetsFolder(tmp_path)
    left._lock.close()

    def refuse(*given, **more):
        raise PermissionError("read-only")

    monkeypatch.setattr(module.Path, "unlink", refuse)
    monkeypatch.setattr(module.shutil, "rmtree", lambda *given, **more: None)
    again = BudgetsFolder(tmp_path)
    assert left.path.is_dir()
    again._lock.close()
