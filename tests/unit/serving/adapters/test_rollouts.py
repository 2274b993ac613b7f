"""Rollouts are kept, shared by processes, and rolled back by their guards."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from support.doubles.fake_engine import FakeRegistry, write_fake_adapters
from support.processes.server_process import ROOT
from support.waiting import wait_until

from lora_jax.adapters.registry import AdapterNotFound, AdapterRejected, RegistryBusy
from serving.adapters import rollouts as module
from serving.adapters.rollout import NoWayBack
from serving.adapters.rollout_guard import Outcome
from serving.adapters.rollouts import FILE, NoRollout, Rollouts


@pytest.fixture
def registry(tmp_path):
    registry = FakeRegistry(write_fake_adapters(tmp_path / "root", "one", "two", "three"))
    for version, folder in {"v1": "one", "v2": "two", "v3": "three"}.items():
        registry.load(f"sql@{version}", folder)
    return registry


@pytest.fixture
def made(registry, tmp_path):
    made = Rollouts(registry)
    made.keep_in(tmp_path / "state")
    return made


def picks(rollouts, count=400):
    return {rollouts.pick("sql", f"user-{n}") for n in range(count)}


def shares(rollouts):
    return {v: n / 100 for v, n in rollouts.state("sql").now.buckets.items() if n}


def test_a_user_keeps_the_version_while_the_share_grows(made):
    assert made.pick("sql", "user-1") == "sql"  # no rollout yet
    made.set("sql", {"v1": 95, "v2": 5})
    users = [f"user-{n}" for n in range(2000)]
    on_new = set()
    for share in (5, 50, 100):
        made.set("sql", {"v1": 100 - share, "v2": share})
        now = {user for user in users if made.pick("sql", user) == "sql@v2"}
        assert on_new <= now
        on_new = now
    assert len(on_new) == len(users)
    assert made.pick("sql@v1", "user-1") == "sql@v1"  # pinned
    assert made.pick("law", "user-1") == "law"


def test_after_a_rollback_no_pick_gives_the_version_in_any_process(made, registry, tmp_path):
    other = Rollouts(registry)
    other.keep_in(tmp_path / "state")
    made.set("sql", {"v1": 50, "v2": 50})
    assert picks(other) == {"sql@v1", "sql@v2"}
    done, wrong, counts = threading.Event(), [], [[0, 0] for _ in range(4)]

    def ask(rollouts, count):
        while not done.is_set():
            rolled = answered.is_set()  # before the pick
            if rollouts.pick("sql", str(sum(count))) == "sql@v2" and rolled:
                wrong.append(rollouts)
            count[rolled] += 1

    answered = threading.Event()
    askers = zip((made, other, made, other), counts, strict=True)
    threads = [threading.Thread(target=ask, args=args) for args in askers]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(before >= 50 for before, _ in counts))
    made.roll_back("sql")
    answered.set()
    wait_until(lambda: all(after >= 200 for _, after in counts) or wrong)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_repeated_call_rolls_back_once(made):
    made.set("sql", {"v1": 100})
    made.set("sql", {"v2": 100})
    made.set("sql", {"v3": 100})
    first = made.roll_back("sql", "call-1")
    assert made.roll_back("sql", "call-1") == first
    assert shares(made) == {"v2": 100}
    made.roll_back("sql", "call-2")
    assert shares(made) == {"v1": 100}
    with pytest.raises(NoWayBack):
        made.roll_back("sql", "call-3")
    assert shares(made) == {"v1": 100}


def test_a_rollback_with_the_id_of_the_rollout_before_it_is_no_repeated_call(made):
    """One id may be that of all calls of a job."""
    made.set("sql", {"v1": 100}, request_id="job")
    made.set("sql", {"v1": 50, "v2": 50}, request_id="job")
    assert made.roll_back("sql", "job").now.served == ("v1",)
    revision = made.state("sql").revision
    assert made.roll_back("sql", "job").revision == revision


def test_a_bad_version_rolls_itself_back(made, registry, tmp_path, caplog):
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.1, "min_requests": 10})
    for _ in range(30):  # of the old version, which no guard looks at, and of weighted sums
        made.finished("sql@v1", Outcome(failed=True))
        made.finished("sql@v2*0.5+law*1", Outcome(failed=True))
    made.finished("sql@v2", Outcome(failed=True))
    assert shares(made) == {"v1": 95, "v2": 5}
    made.finished("sql@v2", Outcome(failed=True))
    wait_until(lambda: shares(made) == {"v1": 100})
    assert made.state("sql").now.why == "guard: error_rate 1 is over 0.1 after 2 requests"
    assert made.state("sql").revision == 2
    wait_until(lambda: "rolled back to v1" in caplog.text)
    again = Rollouts(registry)
    again.keep_in(tmp_path / "state")
    assert shares(again) == {"v1": 100}


def test_a_version_that_cannot_be_read_counts_as_failed(made, registry, tmp_path):
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.0, "min_requests": 1})
    registry.unload("sql@v2")
    registry.refuse("sql@v2", "its files have changed")
    with pytest.raises(AdapterRejected):
        made.resolve("sql@v2")
    wait_until(lambda: shares(made) == {"v1": 100})


def test_a_version_that_is_not_loaded_is_told_and_counts_as_failed(made, registry):
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.0, "min_requests": 1})
    assert made.lacking() == {}
    registry.unload("sql@v2")
    assert made.lacking() == {"sql@v2": 5}
    with pytest.raises(AdapterNotFound):
        made.resolve("sql@v2")
    wait_until(lambda: shares(made) == {"v1": 100})


def test_a_guard_with_no_way_back_says_so_once(made, caplog):
    made.set("sql", {"v1": 100}, {"error_rate": 0.0, "min_requests": 1})
    for _ in range(5):
        made.finished("sql@v1", Outcome(failed=True))
    wait_until(lambda: "no earlier version" in caplog.text)
    for thread in threading.enumerate():
        if thread.name == "guard":
            thread.join()
    assert caplog.text.count("no earlier version") == 1
    assert shares(made) == {"v1": 100}


def test_counts_begin_anew_with_every_change(made):
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.5, "min_requests": 4})
    made.finished("sql@v2", Outcome(failed=True, ttft_s=1.0))
    assert made.seen("sql")["v2"].errors == 1
    made.set("sql", {"v1": 90, "v2": 10}, {"error_rate": 0.5, "min_requests": 4})
    assert "v2" not in made.seen("sql")
    made.finished("sql@v2", Outcome())
    assert made.seen("sql")["v2"].errors == 0


def test_wrong_changes_change_nothing(made):
    for name, versions, guard, named in (
        ("sql", {"v1": 95, "v9": 5}, None, "'v9'"),
        ("sql", {"v1": 120}, None, r"\[0, 100\]"),
        ("sql@v1", {"v1": 100}, None, "no name"),
        ("../sql", {"v1": 100}, None, "no name"),
        ("law", {"v1": 100}, None, "loaded: none"),
        ("sql", {"v1": 100}, {"error_rat": 1}, "'error_rat'"),
    ):
        with pytest.raises(ValueError, match=named):
            made.set(name, versions, guard)
    assert made.states() == {}
    for change in (made.roll_back, made.end, made.state):
        with pytest.raises(NoRollout, match="'sql' has no rollout"):
            change("sql")


def test_a_version_that_cannot_be_read_gets_no_share(made, registry):
    registry.load("sql@v4", "one")
    registry._entries.pop("sql@v4")
    with pytest.raises((ValueError, AdapterNotFound)):
        made.set("sql", {"v1": 50, "v4": 50})
    assert made.states() == {}


def test_versions_with_and_without_a_task_head_do_not_share_users(made, registry, monkeypatch):
    resolve, head = registry.resolve, SimpleNamespace(report=SimpleNamespace(head=object()))
    monkeypatch.setattr(registry, "resolve", lambda n, *a: head if "v2" in n else resolve(n, *a))
    with pytest.raises(ValueError, match="'v2' has a task head and 'v1' has none: requests for"):
        made.set("sql", {"v1": 95, "v2": 5})
    assert made.states() == {}
    assert made.set("sql", {"v2": 100}).now.served == ("v2",)
    assert made.set("sql", {"v1": 60, "v3": 40}).now.served == ("v1", "v3")


def test_versions_with_a_share_cannot_be_unloaded(made):
    made.set("sql", {"v1": 95, "v2": 5})
    with pytest.raises(ValueError, match="'sql@v2' has 5% of 'sql'"):
        made.check_unload("sql@v2")
    made.roll_back("sql")
    made.check_unload("sql@v2")
    assert made.kept() == {"sql@v1", "sql@v2"}
    made.end("sql")
    made.check_unload("sql@v1")
    assert made.kept() == frozenset()


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


def test_the_end_of_a_request_does_not_wait_for_a_change(made, monkeypatch):
    """Before: the engine's thread waited while a change was written."""
    made.set("sql", {"v1": 50, "v2": 50})
    writing, write_on, write_whole = threading.Event(), threading.Event(), module.write_whole

    def slow(path, data):
        writing.set()
        assert write_on.wait(60)
        write_whole(path, data)

    monkeypatch.setattr(module, "write_whole", slow)
    change = threading.Thread(target=made.roll_back, args=("sql",))
    change.start()
    assert writing.wait(60)
    ended = threading.Thread(target=made.finished, args=("sql@v2", Outcome()))
    ended.start()
    ended.join(60)
    has_waited = ended.is_alive()
    write_on.set()
    change.join()
    ended.join()
    assert not has_waited


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


def test_a_guards_verdict_on_an_older_revision_changes_nothing(made):
    made.set("sql", {"v1": 95, "v2": 5})
    made.set("sql", {"v1": 50, "v2": 50})
    made._act("sql", 1, "errors")
    assert shares(made) == {"v1": 50, "v2": 50}
    made._act("none", 1, "errors")


def test_there_are_at_most_so_many_rollouts(made, registry, monkeypatch):
    monkeypatch.setattr(module, "_MOST_NAMES", 1)
    registry.load("law@v1", "one")
    made.set("sql", {"v1": 100})
    with pytest.raises(ValueError, match="at most 1 rollouts; end one"):
        made.set("law", {"v1": 100})
    made.set("sql", {"v2": 100})


def test_a_busy_registry_is_no_failure_of_a_version(made, registry, monkeypatch):
    made.set("sql", {"v1": 100})

    def busy(*given):
        raise RegistryBusy("other loads are under way", 1.0)

    monkeypatch.setattr(registry, "resolve", busy)
    with pytest.raises(RegistryBusy):
        made.resolve("sql@v1")
    assert all(seen.errors == 0 for seen in made.seen("sql").values())


@pytest.mark.parametrize("text", ['{"format": 9}', '{"format": 1, "rollouts": {"../x": {}}}'])
def test_another_format_and_names_that_leave_the_folder_are_refused(registry, tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=r"holds no rollouts \((format 9|a name that is not)"):
        Rollouts(registry).keep_in(tmp_path)
