"""Loads at run time outlast processes; what changed on the disk is refused by name."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.cases import adapter_cases as cases
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.processes.http_server import client_of

from lora_jax.adapters.registry import (
    AdapterRegistry,
    AdapterRejected,
    RegistryBusy,
    RegistryLimits,
)
from serving.adapters import journal, load_attempts
from serving.adapters.journal import Changes, Journal, Loaded, replay
from serving.http.app import create_app
from serving.http.settings import HttpSettings

DIGEST = "ab" * 32
SETTINGS = HttpSettings(enable_runtime_lora=True)


@pytest.fixture
def root(tmp_path):
    return write_fake_adapters(tmp_path / "adapters", "sql", "law", "art")


def load(client, name, path, **more):
    body = {"lora_name": name, "lora_path": path, **more}
    return client.post("/v1/load_lora_adapter", json=body)


def names(engine):
    return {entry.name: entry.digest for entry in engine.registry.entries()}


def test_what_was_loaded_is_there_after_a_restart(root, tmp_path):
    """Before: 404 for ever, although the answer was "Success"."""
    engine = FakeEngine(root)
    with client_of(create_app(engine, SETTINGS, journal=Journal(tmp_path / "state"))) as client:
        answer = load(client, "mine", "sql", pinned=True)
        assert answer.text == "Success: LoRA adapter 'mine' added successfully."
        assert load(client, "other", "law").status_code == 200
        assert load(client, "gone", "art").status_code == 200
        assert client.request("DELETE", "/v1/loras/gone").status_code == 200
    again = FakeEngine(root)
    again.registry.load("gone", "art")  # of --lora-modules
    assert replay(Journal(tmp_path / "state").read(), again.registry) == {}
    assert names(again) == names(engine)
    assert again.registry.get("mine").pinned
    generation = again.registry._generation
    assert replay(Journal(tmp_path / "state").read(), again.registry) == {}
    assert again.registry._generation == generation  # nothing is read twice


def test_changed_files_are_refused_by_name_and_the_rest_is_served(root, tmp_path, caplog):
    engine, made = FakeEngine(root), Journal(tmp_path / "state")
    with client_of(create_app(engine, SETTINGS, journal=made)) as client:
        for name in ("sql", "law", "art"):
            assert load(client, name, name).status_code == 200
    (root / "sql" / "adapter_config.json").write_text('{"r": 8}')
    (root / "art" / "adapter_config.json").unlink()
    again = FakeEngine(root)
    assert sorted(replay(made.read(), again.registry)) == ["art", "sql"]
    assert list(names(again)) == ["law"]
    assert "Adapter sql of the journal is not served" in caplog.text
    with pytest.raises(AdapterRejected, match="have changed"):
        again.registry.resolve("sql")  # nor by its folder's name
    with client_of(create_app(again, SETTINGS, journal=made)) as client:
        assert client.post("/v1/completions", json={"model": "law", "prompt": "x"}).is_success
        assert load(client, "sql", "sql").status_code == 200
        assert client.post("/v1/completions", json={"model": "sql", "prompt": "x"}).is_success


def test_a_replay_replaces_what_is_there_and_reads_below_the_folder_only(root, tmp_path):
    engine = FakeEngine(root)
    law, sql = (engine.registry.load("a", name, replace=True) for name in ("law", "sql"))
    assert names(engine) == {"a": sql.digest}
    assert replay(Changes({"a": Loaded("law", law.digest)}), engine.registry) == {}
    assert names(engine) == {"a": law.digest}
    write_fake_adapters(tmp_path / "outside", "secret")
    failures = replay(Changes({"b": Loaded("../outside/secret", DIGEST)}), engine.registry)
    assert "outside of the adapter folder" in failures["b"]
    assert names(engine) == {"a": law.digest}


@pytest.mark.parametrize("field", ["path", "pinned"])
def test_an_entry_of_a_wrong_kind_is_no_journal(tmp_path, field):
    made = Journal(tmp_path)
    made.loaded("a", Loaded("x", DIGEST))
    content = json.loads((tmp_path / journal.FILE).read_text().partition("\n#")[0])
    content["loaded"]["a"][field] = 5
    (tmp_path / journal.FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="wrong entry of 'a'"):
        made.read()


def test_a_replay_beside_requests_leaves_evicted_adapters_alone(tmp_path):
    """A change of another name dropped and refused those that had no room to be read again."""
    for name in ("sql", "law"):
        cases.write_adapter(tmp_path / name, cases.dense_tensors(seed=len(name) + ord(name[0])))
    reads: list[str] = []
    registry = AdapterRegistry(
        cases.llama(),
        lora_dir=tmp_path,
        limits=RegistryLimits(max_in_memory=1),
        keep=lambda weights: reads.append(weights.digest) or weights,
    )
    entries = {name: registry.load(name, name) for name in ("sql", "law")}
    registry.set_in_use(lambda: {entries["law"].digest})  # a request runs
    changes = Changes({name: Loaded(name, entry.digest) for name, entry in entries.items()})
    assert replay(changes, registry) == {}
    assert registry.refused == {}
    assert [one.name for one in registry.known()] == ["law", "sql"]
    assert len(reads) == 2, "nothing was read again"
    registry.set_in_use(frozenset)
    assert registry.resolve("sql").digest == entries["sql"].digest


def test_a_load_that_cannot_be_recorded_is_not_acknowledged(root, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    engine, made = FakeEngine(root), Journal(tmp_path / "state")
    with client_of(create_app(engine, SETTINGS, journal=made)) as client:
        assert load(client, "law", "law").status_code == 200
        monkeypatch.setattr(os, "fsync", full)
        answer = load(client, "mine", "sql")
        assert answer.status_code == 503
        assert "No space left on device" in answer.json()["error"]["message"]
        assert list(names(engine)) == ["law"]
        monkeypatch.undo()
        assert load(client, "mine", "sql").status_code == 200
    assert sorted(made.read().loaded) == ["law", "mine"]
    left = {journal.FILE, journal.LOCK, load_attempts.FILE}
    assert set(os.listdir(tmp_path / "state")) <= left


def test_several_writers_lose_nothing(tmp_path):
    made = [Journal(tmp_path) for _ in range(4)]

    def write(place):
        for number in range(20):
            made[place].loaded(f"{place}-{number}", Loaded("x", DIGEST))

    threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made[0].read().loaded) == 80


def test_the_same_again_costs_no_write(tmp_path, monkeypatch):
    made = Journal(tmp_path)
    made.loaded("a", Loaded("x", DIGEST))
    monkeypatch.setattr(Journal, "_write", None)
    made.loaded("a", Loaded("x", DIGEST))


def test_what_was_before_is_put_back(tmp_path):
    made = Journal(tmp_path)
    made.loaded("a", Loaded("x", DIGEST))
    before = made.read()
    made.loaded("a", Loaded("y", DIGEST))
    made.loaded("b", Loaded("z", DIGEST))
    made.put_back("a", before)
    made.put_back("b", before)
    assert made.read() == Changes({"a": Loaded("x", DIGEST)}, ("b",))


@pytest.mark.parametrize("before", ["loaded", "unloaded", "given by a flag"])
def test_a_load_that_fails_after_its_record_leaves_what_was_recorded(tmp_path, before, caplog):
    made = Journal(tmp_path)
    made.loaded("other", Loaded("x", DIGEST))
    if before == "loaded":
        made.loaded("a", Loaded("x", DIGEST))
    elif before == "unloaded":
        made.unloaded("a")
    then = made.read()

    def fail(name, do):
        with made.loading(name, Loaded("y", DIGEST)):
            do()
            raise RuntimeError("no room")

    def is_there():
        assert made.read().loaded["a"].path == "y"  # before it happens

    with pytest.raises(RuntimeError, match="no room"):
        fail("a", is_there)
    assert made.read() == then
    with made.loading("a", Loaded("y", DIGEST)):
        pass
    assert made.read() == then.with_loaded("a", Loaded("y", DIGEST))
    with pytest.raises(RuntimeError, match="no room"):
        fail("b", lambda: (tmp_path / journal.FILE).write_text("broken"))
    assert "b is recorded, but was not loaded" in caplog.text


def test_a_load_in_place_on_a_full_disk_keeps_the_old_weights_now_and_after_a_restart(
    root, tmp_path, monkeypatch
):
    engine, made = FakeEngine(root), Journal(tmp_path / "state")
    with client_of(create_app(engine, SETTINGS, journal=made)) as client:
        assert load(client, "a", "sql").status_code == 200
        old = engine.registry.get("a")

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        assert load(client, "a", "law", load_inplace=True).status_code == 503
        monkeypatch.undo()
        assert engine.registry.get("a") is old
        again = FakeEngine(root)
        assert replay(made.read(), again.registry) == {}
        assert names(again) == {"a": old.digest}

        def busy(*_):
            raise RegistryBusy("The host has no room.")

        monkeypatch.setattr(engine.registry, "publish", busy)
        assert load(client, "a", "law", load_inplace=True).status_code == 503
        assert made.read().loaded["a"].digest == old.digest


def test_a_load_takes_its_name_from_the_unloaded_and_out_of_quarantine(tmp_path, monkeypatch):
    made = Journal(tmp_path)
    for name in ("a", "b"):
        made.unloaded(name)
    forgotten = []
    monkeypatch.setattr(made.attempts, "forget", lambda *which: forgotten.append(which))
    with made.loading("a", Loaded("x", DIGEST)):
        pass
    assert made.read() == Changes({"a": Loaded("x", DIGEST)}, ("b",))
    assert forgotten == [("a", DIGEST)]


def test_unloaded_names_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_MOST_UNLOADED", 3)
    changes = Changes()
    for number in range(10):
        changes = changes.with_unloaded(str(number))
    assert changes.unloaded == ("7", "8", "9")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "loaded": {}, "unloaded": []}',
        '{"format": 1, "loaded": {"a": {}}, "unloaded": []}',
        '{"format": 1, "loaded": {"a": {"path": "x", "digest": "no"}}, "unloaded": []}',
        '{"format": 1, "loaded": {}, "unloaded": [1]}',
        "[" * 100_000,
    ],
)
def test_a_broken_journal_is_named(tmp_path, text):
    (tmp_path / journal.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"adapters\.json is no journal of adapters"):
        Journal(tmp_path)


def test_a_damaged_journal_is_found_and_one_without_a_digest_is_read(tmp_path):
    made = Journal(tmp_path)
    made.loaded("a", Loaded("x", DIGEST))
    file = tmp_path / journal.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    file.write_text(text.replace('"x"', '"y"'))
    with pytest.raises(ValueError, match="its digest is another one"):
        made.read()
    file.write_text(text.partition("\n#")[0])
    assert made.read().loaded == {"a": Loaded("x", DIGEST)}


def test_parts_of_a_killed_writer_go_with_the_next_write(tmp_path):
    made, part = Journal(tmp_path), tmp_path / f".{journal.FILE}.0123456789abcdef.part"
    part.touch()
    assert journal.is_ours(part.name)
    made.loaded("a", Loaded("x", DIGEST))
    assert not part.exists()


def test_why_adapters_are_not_served_is_in_the_list(root, tmp_path):
    engine, made = FakeEngine(root), Journal(tmp_path / "state")
    with client_of(create_app(engine, SETTINGS, journal=made)) as client:
        assert load(client, "law", "law").status_code == 200
        assert "refused" not in client.get("/v1/loras").json()
    for _ in range(load_attempts.MOST_ENDS):  # processes that ended
        made.attempts._note("+", "law", made.read().loaded["law"].digest)
    again = FakeEngine(root)
    replay(made.read(), again.registry, made.attempts)
    with client_of(create_app(again, SETTINGS, journal=made)) as client:
        listed = client.get("/v1/loras").json()
        assert listed["count"] == 0
        assert listed["refused"]["law"].startswith("Quarantined: 3 processes in a row")
        assert load(client, "law", "law").status_code == 200
        assert "refused" not in client.get("/v1/loras").json()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/unload_lora_adapter", {"lora_name": "law"}),
        ("/unload_lora_adapter", {"lora_name": "law"}),
        ("/v1/loras/law", None),
    ],
)
def test_what_is_not_served_can_be_unloaded_for_good(root, tmp_path, route, body):
    """Without it the journal keeps a name whose files are gone, and each start logs an error."""
    engine, made = FakeEngine(root), Journal(tmp_path / "state")
    with client_of(create_app(engine, SETTINGS, journal=made)) as client:
        assert load(client, "law", "art").status_code == 200
    (root / "art").rename(tmp_path / "away")
    again = FakeEngine(root)
    assert "law" in replay(made.read(), again.registry)
    with client_of(create_app(again, SETTINGS, journal=made)) as client:
        assert "Load it again, or unload it." in client.get("/v1/loras").json()["refused"]["law"]
        method = "DELETE" if body is None else "POST"
        answer = client.request(method, route, json=body)
        assert answer.status_code == 200, answer.text
        assert "refused" not in client.get("/v1/loras").json()
        assert client.request(method, route, json=body).status_code in (400, 404)
    assert made.read() == Changes(unloaded=("law",))
    assert replay(made.read(), FakeEngine(root).registry) == {}


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="others may write it"):
        Journal(tmp_path / "open")
    Journal(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700


def test_a_folder_has_one_server(tmp_path):
    made = Journal(tmp_path)
    with (
        made.owned(),
        pytest.raises(ValueError, match="Another server uses"),
        Journal(tmp_path).owned(),
    ):
        pass
    with made.owned():
        pass


KILLED = """
import os, sys
from serving.adapters.journal import Journal, Loaded
made = Journal(sys.argv[1])
number = 0
while True:
    made.loaded(f"a{number}", Loaded("x", "ab" * 32))
    print(number, flush=True)
    number += 1
"""


def test_a_writer_that_is_killed_leaves_a_whole_file_with_all_it_told_of(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            told = [process.stdout.readline() for _ in range(20)][-1]
            process.kill()
        found = Journal(tmp_path).read().loaded
        assert set(found) >= {f"a{n}" for n in range(int(told) + 1)}
        text = Path(tmp_path, journal.FILE).read_text()
        assert json.loads(text.partition("\n#")[0])["format"] == 1


def test_files_are_removed(tmp_path):
    made = Journal(tmp_path)
    made.loaded("a", Loaded("x", DIGEST))
    journal.remove(tmp_path)
    journal.remove(tmp_path)
    assert not os.listdir(tmp_path)
