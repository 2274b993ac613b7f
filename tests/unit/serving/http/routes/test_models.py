"""/v1/models in vLLM's shape, adapters included."""

import httpx
import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.settings import HttpSettings


def test_list_has_the_base_and_every_adapter_of_the_folder(client):
    answer = client.get("/v1/models").json()
    assert answer["object"] == "list"
    cards = {card["id"]: card for card in answer["data"]}
    assert list(cards) == ["fake-base", "law", "sql"]
    assert cards["fake-base"]["parent"] is None
    assert cards["sql"]["parent"] == "fake-base"
    for card in cards.values():
        assert card["object"] == "model"
        assert card["max_model_len"] == 64
        assert isinstance(card["created"], int)
        assert card["root"] == card["id"]
        assert card["permission"][0]["object"] == "model_permission"


def test_one_card_by_id(client):
    assert client.get("/v1/models/sql").json()["parent"] == "fake-base"
    assert client.get("/v1/models/fake-base").json()["parent"] is None
    assert client.get("/v1/models/some/where/fake-base").status_code == 404, "it tells the folder"
    answer = client.get("/v1/models/no/such")
    assert answer.status_code == 404
    assert answer.json() == {
        "error": {
            "message": "The model `no/such` does not exist. GET /v1/models lists the models.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


def test_served_names_replace_the_folder_s_and_may_hold_slashes():
    settings = HttpSettings(served_names=("org/model", "alias"))
    with client_of(create_app(FakeEngine(), settings)) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["org/model", "alias"]
        assert client.get("/v1/models/org/model").json()["id"] == "org/model"
        assert _complete(client, "alias")["model"] == "org/model"
        with pytest.raises(httpx.HTTPStatusError):
            _complete(client, "fake-base")


def _complete(client: httpx.Client, model: str) -> dict:
    answer = client.post("/v1/completions", json={"model": model, "prompt": "x"})
    return answer.raise_for_status().json()
