"""Keys come and go while the server runs; a bad file changes nothing."""

import json
import os
import signal
import time

import pytest

from serving.http.access import key_watch
from serving.http.access.audit import AuditLog
from serving.http.access.key_file import read_keys_file
from serving.http.access.key_hash import new_key
from serving.http.access.key_watch import KeyWatch
from serving.http.access.keys import KeyRing
from serving.http.settings import HttpSettings


def write(path, *hashes: str, mode: int = 0o600) -> None:
    text = "".join(json.dumps({"id": "a", "hash": one}) + "\n" for one in hashes)
    other = path.with_suffix(".new")
    other.write_text(text)
    other.chmod(mode)
    os.replace(other, path)


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "keys"
    keys = [new_key("a") for _ in range(2)]
    write(path, keys[0][1])
    ring = KeyRing(HttpSettings(tenants=read_keys_file(path), keys_file=str(path)))
    return path, keys, ring, KeyWatch(str(path), ring, AuditLog(str(tmp_path / "audit")))


def valid(ring: KeyRing, keys) -> list[bool]:
    return [ring.find(key) is not None for key, _ in keys]


def test_rotation_overlaps_and_ends(case):
    path, keys, ring, watch = case
    watch.look()
    assert valid(ring, keys) == [True, False]
    write(path, keys[0][1], keys[1][1])
    watch.look()
    assert valid(ring, keys) == [True, True]
    write(path, keys[1][1])
    watch.look()
    assert valid(ring, keys) == [False, True]
    audit = [json.loads(line) for line in (path.parent / "audit").read_text().splitlines()]
    assert [(x["action"], x["status"], x["detail"]) for x in audit] == [
        ("rotation", 200, "2 keys"),
        ("rotation", 200, "1 keys"),
    ]


def test_a_bad_file_or_none_leaves_the_keys_and_says_why(case, caplog):
    path, keys, ring, watch = case
    path.write_text("{\n")
    watch.look()
    write(path, keys[1][1], mode=0o622)
    watch.look()
    path.unlink()
    watch.look()
    assert valid(ring, keys) == [True, False]
    told = [r.getMessage() for r in caplog.records if r.name == key_watch.__name__]
    assert len(told) == 3
    assert "neither YAML" in told[0]
    assert "may change" in told[1]
    assert "No such file" in told[2]
    write(path, keys[1][1])
    watch.look()
    assert valid(ring, keys) == [False, True]


def test_the_thread_and_sighup(case):
    path, keys, ring, watch = case
    before = signal.getsignal(signal.SIGHUP)
    with watch:
        write(path, keys[1][1])
        os.kill(os.getpid(), signal.SIGHUP)
        end = time.monotonic() + 60
        while valid(ring, keys) != [False, True]:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert signal.getsignal(signal.SIGHUP) == before
