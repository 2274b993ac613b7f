"""An engine behind HTTP on a socket that is bound already; test_launch.py has the command."""

import json
import logging
import socket
from types import SimpleNamespace

import httpx
import pytest
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.processes.served_here import served_here

import serving
from serving.adapters.journal import Journal
from serving.api.config import EngineConfig
from serving.cli.flag_values import lora_module
from serving.cli.options import Options
from serving.cli.serve import (
    StartError,
    has_template,
    journal_of,
    keep_rollouts,
    only_server,
    serve,
    tell_unused_state,
    url_of,
)
from serving.http.access.key_file import read_keys_file
from serving.http.settings import HttpSettings


def options(**more):
    return Options(EngineConfig(model="m"), HttpSettings(), **more)


def test_urls():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert url_of(options(), sock) == f"http://127.0.0.1:{port}"
        tls = options(host="::1", uvicorn={"ssl_certfile": "f"})
        assert url_of(tls, sock) == f"https://[::1]:{port}"


def test_a_unix_socket_has_a_url_too(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        assert url_of(options(), sock) == f"unix://{tmp_path}/s"


def test_an_engine_gets_the_server_it_is_to_use(monkeypatch):
    given = []

    def engine(model, adapters, **fields):
        given.append(fields.get("lora_server"))
        raise ValueError("enough")

    monkeypatch.setattr(serving, "Engine", engine, raising=False)
    with socket.socket() as sock:
        for access in (None, "access"):
            with pytest.raises(StartError, match="Cannot serve m: enough"):
                serve(options(), sock, access)
    assert given == [None, "access"]


def test_a_state_folder_is_for_loads_at_run_time_and_for_one_server(tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    state = str(tmp_path / "state")
    assert journal_of(options(state_dir=state)) is None
    lenient = HttpSettings(enable_runtime_lora=True)
    asked = Options(EngineConfig(model="m"), lenient, state_dir=state)
    journal = journal_of(asked)
    assert journal is not None
    with (
        only_server(journal),
        pytest.raises(StartError, match="Another server uses the state folder state"),
        only_server(journal),
    ):
        pass
    (tmp_path / "state" / "adapters.json").write_text("{")
    with pytest.raises(StartError, match="is no journal of adapters"):
        journal_of(asked)


def test_versions_with_a_share_that_are_not_loaded_are_told(tmp_path, caplog):
    rollouts = SimpleNamespace(keep_in=lambda folder: None, lacking=lambda: {"sql@v2": 5.0})
    keep_rollouts(SimpleNamespace(rollouts=rollouts), Journal(str(tmp_path / "state")))
    assert "sql@v2 has 5% of its rollout and is not loaded" in caplog.text


def test_a_state_that_is_not_used_is_told(tmp_path, caplog):
    """Before: a restart without the flag forgot loads and rollouts, and said nothing."""
    tell_unused_state(options(state_dir=str(tmp_path)))
    assert not caplog.text
    (tmp_path / "rollouts.json").write_text("{}")
    tell_unused_state(options(state_dir=str(tmp_path)))
    assert "rollouts.json of --state-dir: not used" in caplog.text


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """`serving.Engine` is a double over adapter folders; the ones that were made."""
    root = write_fake_adapters(tmp_path / "root", "sql", "law")
    made = []

    class Engine(FakeEngine):
        def __init__(self, model, adapters, *, pinned=(), **fields):
            super().__init__(root)
            self.fields, self.given = fields, adapters
            for name, path in adapters.items():
                self.registry.load(name, path, pinned=name in pinned)
            made.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.close()

    monkeypatch.setattr(serving, "Engine", Engine, raising=False)
    (tmp_path / "m").mkdir()
    (tmp_path / "state").mkdir(mode=0o700)
    return made


def test_loads_of_an_earlier_server_are_repeated_and_metrics_have_a_port_of_their_own(
    engines, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    asked = Options(
        EngineConfig(model=str(tmp_path / "m")),
        HttpSettings(enable_runtime_lora=True),
        adapters=(lora_module('{"name": "kept", "path": "law", "pinned": true}'),),
        state_dir=str(tmp_path / "state"),
        metrics_port=0,
    )

    def load(client):
        body = {"lora_name": "mine", "lora_path": "sql"}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        metrics = caplog.text.rpartition("Metrics without a key at ")[2].split()[0].rstrip(".")
        return httpx.get(metrics).text, client.get("/health").status_code

    text, status = served_here(serve, asked, load)
    assert status == 200
    assert "http_requests" in text
    assert (tmp_path / "state" / "adapters.json").exists()

    def names(client):
        return [card["id"] for card in client.get("/v1/models").json()["data"]]

    assert {"kept", "mine"} <= set(served_here(serve, asked, names))
    assert [engine.alive for engine in engines] == [False, False]
    assert engines[1].registry.get("kept").pinned
    assert [engine.given for engine in engines] == [{"kept": "law"}] * 2  # sizes follow from it


def test_keys_of_a_file_are_checked_and_what_cannot_be_opened_ends_the_start(engines, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"the-key": {"id": "lawyer"}}))
    keys.chmod(0o600)
    model = EngineConfig(model=str(tmp_path / "m"))
    tenants = read_keys_file(str(keys))
    http = HttpSettings(keys_file=str(keys), tenants=tenants)

    def ask(client):
        headers = [{}, {"Authorization": "Bearer the-key"}]
        return [client.get("/v1/models", headers=given).status_code for given in headers]

    assert served_here(serve, Options(model, http), ask) == [401, 200]
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as sock:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"Cannot listen on 127.0.0.1:{port}: Address alr"):
            serve(Options(model, HttpSettings(), metrics_port=port), sock)
        http = HttpSettings(audit_log=str(tmp_path / "none" / "audit"))
        with pytest.raises(StartError, match="Cannot write --audit-log: No such file"):
            serve(Options(model, http), sock)
    assert not any(engine.alive for engine in engines)


def test_an_instance_that_only_its_front_may_ask_tells_nobody_how_to_ask_it(
    engines, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    asked = Options(EngineConfig(model=str(tmp_path / "m")), HttpSettings(front_secret="s" * 32))
    refused = served_here(serve, asked, lambda client: client.get("/v1/models").status_code)
    assert refused == 407
    assert " to its front alone." in caplog.text
    assert "curl" not in caplog.text


def test_rollouts_that_cannot_be_read_end_the_start(engines, tmp_path):
    state = tmp_path / "state"
    (state / "rollouts.json").write_text("{")
    http = HttpSettings(enable_runtime_lora=True)
    asked = Options(EngineConfig(model=str(tmp_path / "m")), http, state_dir=str(state))
    with socket.socket() as sock, pytest.raises(StartError, match="Cannot use --state-dir: "):
        serve(asked, sock)
    assert not engines[0].alive


def test_a_template_is_seen_without_an_engine(tmp_path):
    assert not has_template(EngineConfig(model=str(tmp_path)))
    assert has_template(EngineConfig(model=str(tmp_path), chat_template="{{ messages }}"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert has_template(EngineConfig(model=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text("no JSON")
    (tmp_path / "chat_template.jinja").unlink()
    assert not has_template(EngineConfig(model=str(tmp_path)))
