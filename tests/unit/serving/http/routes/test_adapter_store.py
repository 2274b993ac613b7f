"""Permissions to change adapters."""

import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.routes.adapter_store import adapter_id
from serving.http.settings import HttpSettings

CHANGES = [
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "sql"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}),
    ("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "sql"}),
    ("POST", "/unload_lora_adapter", {"lora_name": "sql"}),
    ("POST", "/v1/loras", {"lora_name": "x", "source": {"uri": "sql"}}),
    ("DELETE", "/v1/loras/sql", None),
]


def statuses(client, **headers: str) -> set[int]:
    answers = [
        client.request(method, path, json=body, headers=headers) for method, path, body in CHANGES
    ]
    return {answer.status_code for answer in answers}


def test_off_by_default(lora_dir):
    with client_of(create_app(FakeEngine(lora_dir))) as client:
        assert statuses(client) == {403}
        answer = client.post("/v1/load_lora_adapter", json=CHANGES[0][2])
        assert "--enable-runtime-lora" in answer.json()["error"]["message"]


def test_the_admin_key_is_needed_where_there_is_one(lora_dir):
    settings = HttpSettings(api_keys=("user",), admin_keys=("root",), enable_runtime_lora=True)
    with client_of(create_app(FakeEngine(lora_dir), settings)) as client:
        assert statuses(client) == {401}
        assert statuses(client, Authorization="Bearer user") == {403}
        headers = {"Authorization": "Bearer root"}
        answer = client.post("/v1/load_lora_adapter", json=CHANGES[0][2], headers=headers)
        assert answer.status_code == 200
        assert client.delete("/v1/loras/x", headers=headers).status_code == 200


def test_an_api_key_is_enough_without_an_admin_key(lora_dir):
    settings = HttpSettings(api_keys=("user",), enable_runtime_lora=True)
    with client_of(create_app(FakeEngine(lora_dir), settings)) as client:
        headers = {"Authorization": "Bearer user"}
        answer = client.post("/v1/load_lora_adapter", json=CHANGES[0][2], headers=headers)
        assert answer.status_code == 200


def test_nothing_is_loaded_without_a_folder():
    settings = HttpSettings(enable_runtime_lora=True)
    with client_of(create_app(FakeEngine(), settings)) as client:
        answer = client.post("/v1/load_lora_adapter", json=CHANGES[0][2])
        assert answer.status_code == 400
        assert "--lora-dir" in answer.json()["error"]["message"]


class FullDisk:
    """A journal on a full disk, in which nothing was recorded yet."""

    is_lasting = True

    def loading(self, name, entry):
        raise OSError(28, "No space left on device")

    def unloaded(self, name):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("change", [CHANGES[0], CHANGES[1]])
def test_what_cannot_be_recorded_does_not_happen(lora_dir, change):
    """An adapter that was taken away would be back after the next start."""
    engine = FakeEngine(lora_dir)
    engine.registry.load("sql", "sql")
    before = [known.name for known in engine.registry.known()]
    app = create_app(engine, HttpSettings(enable_runtime_lora=True), journal=FullDisk())
    with client_of(app) as client:
        answer = client.post(change[1], json=change[2])
        assert answer.status_code == 503
        assert "No space left on device" in answer.json()["error"]["message"]
        unknown = client.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
        assert unknown.status_code == 404
    assert [known.name for known in engine.registry.known()] == before


def test_a_load_in_place_that_cannot_be_recorded_keeps_the_old_weights(lora_dir):
    engine = FakeEngine(lora_dir)
    before = engine.registry.load("sql", "sql")
    app = create_app(engine, HttpSettings(enable_runtime_lora=True), journal=FullDisk())
    with client_of(app) as client:
        body = {"lora_name": "sql", "lora_path": "sql", "load_inplace": True}
        answer = client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 503
    assert "all stays as it was" in answer.json()["error"]["message"]
    assert engine.registry.get("sql") is before


@pytest.mark.parametrize("name", ["sql", "law"])
def test_ids_are_stable_and_fit_31_bits(name):
    assert adapter_id(name) == adapter_id(name)
    assert 0 <= adapter_id(name) < 2**31
    assert adapter_id(name) != adapter_id(name + "2")
