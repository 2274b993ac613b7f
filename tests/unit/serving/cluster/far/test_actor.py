"""The class of actors, without Ray: it starts one process and describes its host."""

import os
import signal
import socket
import threading
import time

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from serving.api.config import EngineConfig
from serving.cluster.far.actor import AUTH, RoleActor
from serving.cluster.far.member import call_bytes
from serving.runtime.about import about_of


def test_it_runs_a_process_with_the_commands_variables(tmp_path):
    actor, statuses = RoleActor(), []
    assert (actor.pid(), actor.is_at_work()) == (0, False)
    file = tmp_path / "said"
    call = call_bytes(
        "role", exec, (f"import os; open({str(file)!r}, 'w').write(os.environ['OF_COMMAND'])",)
    )
    assert actor.run(call, {"OF_COMMAND": "here"}) == 0
    assert file.read_text() == "here"
    long = call_bytes("role", time.sleep, (100,))
    thread = threading.Thread(target=lambda: statuses.append(actor.run(long, {})))
    first = actor.pid()
    thread.start()
    while actor.pid() == first:
        time.sleep(0.01)
    actor.join(0.01)  # no longer
    os.kill(actor.pid(), signal.SIGKILL)
    actor.join(60)
    assert actor._process is not None
    assert actor._process.returncode == -signal.SIGKILL
    thread.join(60)
    assert statuses == [-signal.SIGKILL]


def test_a_process_that_was_killed_before_it_ran_does_not_stay():
    actor = RoleActor()
    actor.join(60)  # of none there is nothing to wait for
    actor.kill()
    assert actor.run(call_bytes("role", time.sleep, (100,)), {}) == -signal.SIGKILL


def test_it_tells_what_must_be_equal_everywhere(tmp_path, monkeypatch):
    tiny_checkpoint.write_model(tmp_path / "model", TinyShape(layers=1))
    config = EngineConfig(str(tmp_path / "model"))
    monkeypatch.setenv(AUTH, "token")
    assert RoleActor().about(config) == about_of(config) | {AUTH: "token"}
    missing = RoleActor().about(EngineConfig(str(tmp_path / "elsewhere")))
    assert "elsewhere" in missing["why"]


def test_it_looks_at_files_and_ports_of_its_host(tmp_path):
    (tmp_path / "probe").write_bytes(b"x")
    actor = RoleActor()
    assert actor.sees(str(tmp_path / "probe"), b"x")
    assert not actor.sees(str(tmp_path / "probe"), b"y")
    assert not actor.sees(str(tmp_path / "none"), b"x")
    with socket.create_server(("127.0.0.1", actor.free_port("127.0.0.1"))):
        pass
    with pytest.raises(OSError, match="assign"):
        actor.free_port("203.0.113.1")
