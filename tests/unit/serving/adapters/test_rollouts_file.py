"""Rollouts in a file that several processes write, and that may be lost, locked or broken."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.cases.rollout_cases import fake_registry, shares
from support.processes.server_process import ROOT
from support.waiting import wait_until

from serving.adapters import rollouts as module
from serving.adapters.rollout_guard import Outcome
from serving.adapters.rollouts import FILE, Rollouts


@pytest.fixture
def registry(tmp_path):
    return fake_registry(tmp_path / "root")


@pytest.fixture
def made(registry, tmp_path):
    made = Rollouts(registry)
    made.keep_in(tmp_path / "state")
    return made


def test_a_full_disk_loses_nothing(made, monkeypatch, tmp_path):
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.0, "min_requests": 1})
    before = (tmp_path / "state" / FILE).read_bytes()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    for change in (lambda: made.set("sql", {"v2": 100}), lambda: made.roll_back("sql")):
        with pytest.raises(OSError, match="No space left"):
            change()
    assert shares(made) == {"v1": 95, "v2": 5}
    assert (tmp_path / "state" / FILE).read_bytes() == before
    made.finished("sql@v2", Outcome(failed=True))  # a guard acts all the same
    wait_until(lambda: shares(made) == {"v1": 100})


def test_a_rollback_that_was_not_kept_is_done_again_when_others_write_the_file(
    made, registry, monkeypatch, tmp_path, caplog
):
    """Their file has the bad version's share, of a revision on which the guard has acted."""
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.0, "min_requests": 1})

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_whole", full)
        made.finished("sql@v2", Outcome(failed=True))
        wait_until(lambda: shares(made) == {"v1": 100})
        assert "The rollout of sql is not kept: No space left on device" in caplog.text
    registry.load("law@v1", "one")
    other = Rollouts(registry)
    other.keep_in(tmp_path / "state")
    other.set("law", {"v1": 100})
    assert shares(made) == {"v1": 95, "v2": 5}
    made.finished("sql@v2", Outcome(failed=True))
    wait_until(lambda: shares(made) == {"v1": 100})
    assert shares(other) == {"v1": 100}


def test_changes_of_several_processes_are_all_kept(registry, tmp_path):
    names = [f"a{n}" for n in range(40)]
    for name in names:
        registry.load(f"{name}@v1", "one")

    def change(mine):
        rollouts = Rollouts(registry)
        rollouts.keep_in(tmp_path / "state")
        for name in mine:
            rollouts.set(name, {"v1": 100})

    threads = [threading.Thread(target=change, args=(names[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = Rollouts(registry)
    last.keep_in(tmp_path / "state")
    assert sorted(last.states()) == sorted(names)


def test_a_folder_that_cannot_be_locked_keeps_no_change(made, tmp_path):
    made.set("sql", {"v1": 95, "v2": 5})
    (tmp_path / "state" / module.LOCK).unlink()
    (tmp_path / "state" / module.LOCK).mkdir()
    with pytest.raises(IsADirectoryError):
        made.set("sql", {"v2": 100})
    assert shares(made) == {"v1": 95, "v2": 5}


def test_without_a_folder_changes_last_as_long_as_the_process(registry):
    made = Rollouts(registry)
    made.set("sql", {"v1": 95, "v2": 5})
    assert made.roll_back("sql").now.served == ("v1",)
    with pytest.raises(ValueError, match="'a b' is no name of an adapter"):
        made.set("a b", {"v1": 100})


@pytest.mark.parametrize("wrong", ["the lock", "the file"])
def test_a_guard_acts_where_the_folder_cannot_be_used(made, monkeypatch, tmp_path, caplog, wrong):
    """Before: its thread ended with an error, and the bad version went on."""
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.0, "min_requests": 1})
    if wrong == "the lock":
        (tmp_path / "state" / module.LOCK).unlink()
        (tmp_path / "state" / module.LOCK).mkdir()
    else:
        (tmp_path / "state" / FILE).write_text("{")
    made.finished("sql@v2", Outcome(failed=True))
    wait_until(lambda: "rolled back to v1" in caplog.text)
    assert shares(made) == {"v1": 100}
    assert made.pick("sql", "x") == "sql@v1"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "rollouts": 3}'])
def test_a_file_that_is_none_is_refused_at_the_start(registry, tmp_path, text):
    (tmp_path / FILE).write_text(text or "\0")
    why = "there is no field 'format'" if text == "{}" else ""
    with pytest.raises(ValueError, match=rf"rollouts\.json holds no rollouts \({why}"):
        Rollouts(registry).keep_in(tmp_path)


def test_a_file_that_breaks_later_changes_nothing(made, tmp_path, caplog):
    made.set("sql", {"v1": 100})
    (tmp_path / "state" / FILE).write_text("{")
    assert made.pick("sql", "x") == "sql@v1"
    assert "holds no rollouts" in caplog.text


WRITER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from serving.adapters.rollouts import Rollouts
names = [SimpleNamespace(name=f"sql@v{n}") for n in (1, 2)]
entry = SimpleNamespace(report=SimpleNamespace(head=None))
made = Rollouts(SimpleNamespace(known=lambda: names, resolve=lambda name: entry))
made.keep_in(sys.argv[1])
for share in range(1, 100):
    made.set("sql", {"v1": 100 - share, "v2": share})
    print(share, flush=True)
"""


@pytest.mark.parametrize("after", [1, 20])
def test_a_kill_in_the_middle_leaves_the_state_before_or_after(registry, tmp_path, after):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        told = [int(writer.stdout.readline()) for _ in range(after)]
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout.read().split()]
    (tmp_path / ".rollouts.json.0123.part").write_text("half")
    again = Rollouts(registry)
    again.keep_in(tmp_path)
    assert shares(again)["v2"] in (told[-1], told[-1] + 1)
    assert again.state("sql").revision in (told[-1], told[-1] + 1)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("text", ['{"format": 9}', '{"format": 1, "rollouts": {"../x": {}}}'])
def test_another_format_and_names_that_leave_the_folder_are_refused(registry, tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=r"holds no rollouts \((format 9|a name that is not)"):
        Rollouts(registry).keep_in(tmp_path)
