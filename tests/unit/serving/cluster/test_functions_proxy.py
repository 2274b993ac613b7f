"""The front of functions whose processes are threads: who answers, who waits, who is refused."""

import socket
import threading
from types import SimpleNamespace

import httpx
import pytest
from support.doubles.functions_double import FunctionsDouble
from support.processes.http_server import serve_app
from support.waiting import wait_until

from serving.cluster.functions_proxy import FunctionsProxy, one_per_process
from serving.functions import tenants
from serving.functions.callers import CallerRing
from serving.functions.running import Running
from serving.http.access.auth import Authenticate
from serving.http.access.keys import KeyRing
from serving.http.settings import HttpSettings, Tenant


@pytest.fixture
def agent():
    made = FunctionsDouble()
    yield made
    made.close()


@pytest.fixture
def proxy(agent, tmp_path):
    for name in ("law", "foreign", "slow", "mortal"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    proxy = FunctionsProxy(agent, str(tmp_path), ["base", "also"], 64)
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy):
    with serve_app(proxy) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(client, model):
    return client.post("/v1/completions", json={"model": model} if model else {})


def test_a_function_answers_to_its_name_and_is_started_once(client, agent, monkeypatch):
    monkeypatch.setattr("serving.cluster.functions_proxy.METRICS_S", 60.0)
    names = ["law", "base:law", "base", "also", None, "law"]
    assert [ask(client, name).text for name in names] == ["law", "law", *["base"] * 3, "law"]
    assert agent.starts == {"law": 1, "base": 1}
    listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert listed == ["base", "also", "foreign", "law", "mortal", "slow"]
    assert client.get("/v1/models/law").json()["parent"] == "base"
    text = client.get("/metrics").text
    assert 'up{engine="law"} 1.0' in text
    assert 'lora_jax:function_requests_total{function="law",status="2xx"} 3.0' in text
    assert client.get("/health").json()["functions"] == {"law": "running", "base": "running"}


def test_what_does_not_exist_is_named(client, agent):
    for name in ("none", "../law", "base:none"):
        assert ask(client, name).status_code == 404
    assert client.get("/v1/models/none").status_code == 404
    answer = client.post("/v1/load_lora_adapter", json={})
    assert answer.status_code == 404
    assert "folders below --functions" in answer.json()["error"]["message"]
    assert agent.starts == {}


def test_a_function_whose_folder_has_gone_is_no_model_any_more(client, agent, tmp_path):
    folder, config = tmp_path / "law", tmp_path / "law" / "adapter_config.json"
    assert ask(client, "law").text == "law"
    wait_until(lambda: agent.functions["law"].running.is_idle)
    config.rename(tmp_path / "kept")
    assert ask(client, "law").status_code == 404
    assert agent.functions["law"].state == "closed"
    assert client.get("/v1/models/law").status_code == 404
    (tmp_path / "kept").rename(folder / "adapter_config.json")
    del agent.functions["law"]  # as an agent does with one that is closed
    assert ask(client, "law").text == "law"


def test_an_adapter_that_does_not_fit_is_refused_with_the_reason_and_tried_once(client, agent):
    for _ in range(2):
        answer = ask(client, "foreign")
        assert answer.status_code == 400
        assert "weights do not fit the base" in answer.json()["error"]["message"]
        assert "/a/b" not in answer.text
    assert agent.starts == {"foreign": 1}
    assert ask(client, "law").text == "law"


def test_others_do_not_wait_for_a_start(client, agent):
    answers = []
    waiting = [
        threading.Thread(target=lambda: answers.append(ask(client, "slow").text)) for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    assert ask(client, "law").text == "law"
    assert answers == []
    agent.go.set()
    for thread in waiting:
        thread.join(60)
    assert answers == ["slow"] * 3
    assert agent.starts["slow"] == 1


def test_a_request_whose_function_dies_is_answered_by_its_next_process(client, agent):
    assert ask(client, "mortal").text == "mortal"
    assert agent.starts["mortal"] == 2


def test_a_device_is_lost_when_the_base_model_does_not_start_either(client, agent, monkeypatch):
    """A front of several devices then asks another one; one adapter's crashes are its own."""
    monkeypatch.setattr("serving.cluster.functions_proxy._PROBE_S", 0.01)
    monkeypatch.setattr("serving.functions.handle._GIVEN_UP_S", 0.05)
    agent.crashing = {"law"}
    assert ask(client, "law").status_code == 503
    wait_until(lambda: agent.starts.get("base"))
    wait_until(lambda: agent.functions["base"].state == "running")
    assert client.get("/health").json()["status"] == "ok"
    agent.crashing = {"law", "base"}
    agent.functions["base"].offload()
    wait_until(lambda: ask(client, "law").status_code == 503 and client.get("/ready").is_error)
    assert client.get("/ready").json()["status"] == "lost"
    assert client.get("/live").status_code == 200
    agent.full, agent.crashing = True, set()
    wait_until(lambda: client.get("/ready").is_success)  # a device that functions fill is not lost
    agent.full = False
    wait_until(lambda: client.get("/ready").is_success)
    wait_until(lambda: ask(client, "law").text == "law")


def test_functions_learn_callers_and_never_keys(proxy, agent):
    tenant = Tenant("secret", id="a", adapters=frozenset({"law"}))
    app = Authenticate(proxy, KeyRing(HttpSettings(tenants=(tenant,))))
    key = {"Authorization": "Bearer secret"}
    with serve_app(app) as url, httpx.Client(base_url=url, headers=key, timeout=60) as client:
        assert ask(client, "law").text == "law"
        assert ask(client, "mortal").status_code == 404
        assert [c["id"] for c in client.get("/v1/models").json()["data"]] == ["base", "also", "law"]
        assert client.get("/v1/models/mortal").status_code == 404
    (head,) = agent.heads
    assert "secret" not in head
    (token,) = [line.split()[-1] for line in head.splitlines() if "authorization" in line.lower()]
    assert CallerRing(None).find(token).id == "a"


def test_one_name_of_the_base_has_a_card_without_a_parent(client):
    assert client.get("/v1/models/also").json()["parent"] is None


def test_a_request_that_its_functions_die_of_is_refused(client, agent):
    agent.mortal.add("law")
    answer = ask(client, "law")
    assert answer.status_code == 503
    assert "Two instances ended while they worked" in answer.json()["error"]["message"]
    assert agent.asked["law"] == 2
    assert ask(client, "base").text == "base"


def test_an_answer_that_breaks_off_is_not_asked_for_again(client, agent):
    agent.cut.add("law")
    with pytest.raises(httpx.RemoteProtocolError, match="peer closed connection"):
        ask(client, "law")
    assert len(agent.heads) == 1
    assert ask(client, "base").text == "base"


def test_a_function_that_does_not_answer_in_time_is_busy(client, agent, monkeypatch):
    monkeypatch.setattr("serving.cluster.functions_proxy.SHORT_S", 0.05)
    agent.silent.add("law")
    answer = client.post("/tokenize", json={"model": "law", "prompt": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    agent.go.set()


def test_a_function_that_takes_no_connection_is_busy(client, agent, monkeypatch):
    assert ask(client, "law").text == "law"
    monkeypatch.setattr(Running, "connect", lambda running: None)
    answer = ask(client, "law")
    assert answer.status_code == 503
    assert "does not take requests now" in answer.json()["error"]["message"]


def test_too_many_wait_for_a_start(client, agent, monkeypatch):
    monkeypatch.setattr("serving.cluster.functions_proxy._WAITING", 0)
    answer = ask(client, "slow")
    assert answer.status_code == 429
    assert "wait for function `slow`" in answer.json()["error"]["message"]
    assert agent.starts == {}


def test_requests_that_waited_for_a_start_make_room_for_later_ones(client, agent, monkeypatch):
    monkeypatch.setattr("serving.cluster.functions_proxy._WAITING", 1)
    for count in range(3):
        assert ask(client, "law").text == "law"
        assert agent.starts["law"] == count + 1
        wait_until(agent.functions["law"].offload)


def test_a_device_that_is_full_is_not_taken_for_a_lost_one(client, agent, monkeypatch):
    looks = []
    monkeypatch.setattr(FunctionsProxy, "_look_at_device", lambda proxy: looks.append(1))
    agent.full = True
    assert ask(client, "law").status_code == 503
    assert looks == []
    agent.full, agent.crashing = False, {"law"}
    assert ask(client, "law").status_code == 503
    assert looks


def test_an_engine_that_functions_share_is_asked_for_its_metrics_once():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Running(ours, 1, {})
        shared = [tenants.Tenant(engine, name, None, None, 1, {}) for name in ("law", "summary")]
        functions = {t.name: SimpleNamespace(running=t) for t in shared}
        off = {"off": SimpleNamespace(running=None)}
        assert one_per_process(functions | off) == {"shared": functions["law"]}
        alone = {name: SimpleNamespace(running=engine) for name in ("law", "summary")}
        assert one_per_process(alone | off) == alone
