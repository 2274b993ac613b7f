"""vLLM's, SGLang's and Dynamo's routes lead to one registry; the report has no paths."""

import pytest
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.routes.adapters import _name_only
from serving.http.settings import HttpSettings


@pytest.fixture
def client(tmp_path):
    root = write_fake_adapters(tmp_path / "root", "sql", "law", "bad-one", "other-base")
    settings = HttpSettings(enable_runtime_lora=True)
    with client_of(create_app(FakeEngine(root), settings)) as client:
        yield client


def loaded(client) -> set[str]:
    return set(client.get("/v1/loras").json()["loras"])


def test_vllm_s_routes_answer_in_text(client):
    body = {"lora_name": "a", "lora_path": "sql"}
    answer = client.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'a' added successfully. It lasts until the server ends; "
        "--state-dir keeps it.",
    )
    assert client.post("/v1/completions", json={"model": "a", "prompt": "x"}).is_success
    again = client.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True}).is_success
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert answer.text == "Success: LoRA adapter 'a' removed successfully."
    assert client.post("/v1/completions", json={"model": "a", "prompt": "x"}).status_code == 404
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"


def test_sglang_s_routes_answer_in_json(client):
    answer = client.post("/load_lora_adapter", json={"lora_name": "b", "lora_path": "law"})
    assert answer.status_code == 200
    assert answer.json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"b": "law"},
        "message": "It lasts until the server ends; --state-dir keeps it.",
    }
    answer = client.post("/load_lora_adapter", json={"lora_name": "b", "lora_path": "law"})
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert "'b'" in answer.json()["error_message"]
    body = {"lora_name": "b", "lora_path": "law", "load_inplace": True}  # as that error says
    assert client.post("/load_lora_adapter", json=body).json()["success"] is True
    answer = client.post("/unload_lora_adapter", json={"lora_name": "b"})
    assert answer.json()["loaded_adapters"] == {}
    assert client.post("/unload_lora_adapter", json={"lora_name": "b"}).status_code == 400


def test_dynamo_s_routes(client):
    body = {"lora_name": "c", "source": {"uri": "file:///sql"}}
    first = client.post("/v1/loras", json=body).json()
    assert first["status"] == "success"
    assert first["message"].endswith(
        "successfully. It lasts until the server ends; --state-dir keeps it."
    )
    assert client.get("/v1/loras").json() == {
        "status": "success",
        "loras": {"c": first["lora_id"]},
        "count": 1,
    }
    assert client.delete("/v1/loras/c").json()["lora_id"] == first["lora_id"]
    assert loaded(client) == set()
    assert client.delete("/v1/loras/c").status_code == 404
    for uri in ("s3://bucket/sql", "hf://org/sql", "file://host/sql", "http://10.0.0.1/sql"):
        answer = client.post("/v1/loras", json=body | {"source": {"uri": uri}})
        assert answer.status_code == 400, uri


def test_all_routes_share_one_registry(client):
    client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "sql"})
    client.post("/load_lora_adapter", json={"lora_name": "b", "lora_path": "sql"})
    client.post("/v1/loras", json={"lora_name": "c", "source": {"uri": "sql"}})
    assert loaded(client) == {"a", "b", "c"}
    client.delete("/v1/loras/a")
    client.post("/unload_lora_adapter", json={"lora_name": "c"})
    client.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
    assert loaded(client) == set()


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a,b", "x" * 65, "fake-base", ".a"])
def test_names_that_are_not_allowed(client, name):
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "sql"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "InvalidUserInput"
    why = "is the base model's" if name == "fake-base" else "is not 1 to 64 letters, digits"
    assert why in error["message"]
    assert loaded(client) == set()


@pytest.mark.parametrize(
    ("path", "status"),
    [("nope", 404), ("", 400), ("a\0b", 400), ("../outside", 400), ("/etc", 400), ("bad-one", 400)],
)
def test_paths_that_do_not_work(client, path, status):
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    assert answer.status_code == status
    assert "/tmp" not in answer.text
    assert ("below --lora-dir" in answer.text) == (path == "nope")
    assert loaded(client) == set()
    if path == "bad-one":
        message = answer.json()["error"]["message"]
        assert message == "adapter_model.safetensors: lora_B is missing."


def test_who_loads_an_adapter_of_another_base_is_told(client):
    body = {"lora_name": "o", "lora_path": "other-base"}
    text = "Warning: made for 'llama'. It lasts until the server ends"  # a file's place is nobody's
    assert text in client.post("/v1/load_lora_adapter", json=body).text
    body |= {"load_inplace": True}
    assert client.post("/load_lora_adapter", json=body).json()["message"].startswith(text)
    body = {"lora_name": "p", "source": {"uri": "file:///other-base"}}
    assert text in client.post("/v1/loras", json=body).json()["message"]
    assert client.get("/v1/adapters/o").json()["warnings"] == ["made for 'llama'."]


def test_report_of_an_adapter_loads_it_and_shows_no_path(client):
    answer = client.get("/v1/adapters/sql")
    report = answer.json()
    assert report["name"] == "sql"
    assert report["modules"]["q_proj"]["ranks"] == [4]
    assert report["base_model"] == "llama"
    assert {"digest", "weight_bytes", "generation", "pinned", "resident"} <= set(report)
    assert "/" not in answer.text
    assert client.get("/v1/adapters/none").status_code == 404
    assert client.get("/v1/adapters/fake-base").status_code == 404


SHOWN = {None: None, "org/model": "org/model", "/a/b/c": "c", "./c": "c", "/c": "c"}
SHOWN |= {"C:\\models\\c": "c", "~/c": "c", "../../c/": "c", "model": "model"}


@pytest.mark.parametrize(("given", "shown"), SHOWN.items())
def test_base_model_is_a_name_not_a_path(given, shown):
    assert _name_only(given) == shown
