"""An engine behind HTTP on a socket that is bound already; test_launch.py has the rest."""

import socket

import pytest

import serving
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.serve import StartError, journal_of, only_server, serve, url_of
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
