"""Rollouts are kept, shared by processes, and rolled back by their guards."""

import threading
from types import SimpleNamespace

import pytest
from support.cases.rollout_cases import fake_registry, picks, shares
from support.waiting import wait_until

from lora_jax.adapters.registry import AdapterNotFound, AdapterRejected, RegistryBusy
from serving.adapters import rollouts as module
from serving.adapters.rollout import NoWayBack
from serving.adapters.rollout_guard import Outcome
from serving.adapters.rollouts import NoRollout, Rollouts


@pytest.fixture
def registry(tmp_path):
    return fake_registry(tmp_path / "root")


@pytest.fixture
def made(registry, tmp_path):
    made = Rollouts(registry)
    made.keep_in(tmp_path / "state")
    return made


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


def test_new_files_under_a_version_are_counted_anew_and_answers_of_the_old_ones_not(made, registry):
    made.set("sql", {"v1": 95, "v2": 5}, {"error_rate": 0.5, "min_requests": 10})
    old = registry.digest_of("sql@v2")
    for _ in range(4):
        made.finished("sql@v2", Outcome(failed=True), old)
    made.finished("sql@v1", Outcome(), registry.digest_of("sql@v1"))
    assert made.seen("sql")["v2"].errors == 4
    registry.load("sql@v2", "two", replace=True)  # the same files
    assert made.seen("sql")["v2"].errors == 4
    registry.load("sql@v2", "three", replace=True)
    assert {version: seen.requests for version, seen in made.seen("sql").items()} == {"v1": 1}
    for _ in range(4):
        made.finished("sql@v2", Outcome(failed=True), old)  # was under way on the old files
    assert "v2" not in made.seen("sql")
    made.finished("sql@v2", Outcome(failed=True), registry.digest_of("sql@v2"))
    made.finished("sql@v2", Outcome(), registry.digest_of("sql@v2"))
    assert (made.seen("sql")["v2"].requests, made.seen("sql")["v2"].errors) == (2, 1)
    assert shares(made) == {"v1": 95, "v2": 5}
