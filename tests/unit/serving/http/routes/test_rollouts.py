"""The routes of a rollout, from publishing to the way back."""

import json

import pytest
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.processes.http_server import client_of

from lora_jax.adapters.registry import AdapterNotFound, AdapterRejected, RegistryBusy
from serving.adapters.rollout import bucket_of
from serving.http.app import create_app
from serving.http.settings import HttpSettings, Tenant

PATH = "/v1/adapters/sql/rollout"


@pytest.fixture
def client(tmp_path):
    root = write_fake_adapters(tmp_path / "root", "sql", "sql-2")
    settings = HttpSettings(enable_runtime_lora=True)
    with client_of(create_app(FakeEngine(root), settings)) as client:
        for version, path in {"v1": "sql", "v2": "sql-2"}.items():
            body = {"lora_name": f"sql@{version}", "lora_path": path}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        yield client


def ask(client, model="sql", session=None, **more):
    headers = {} if session is None else {"X-Session-ID": session}
    body = {"model": model, "prompt": "x", "max_tokens": 2, **more}
    return client.post("/v1/completions", json=body, headers=headers)


def version(answer):
    assert answer.status_code == 200, answer.text
    return answer.headers.get("X-Adapter-Version")


def test_publishing_moves_nobody(client):
    answer = ask(client)
    assert version(answer) is None  # the plain adapter
    assert answer.json()["system_fingerprint"] is None
    assert version(ask(client, "sql@v2")) == "v2"
    assert ask(client, "sql@v3").status_code == 404


def test_users_move_forward_and_return(client):
    users = [f"user-{n}" for n in range(40)]
    on_new = set()
    for share in (5, 50, 100):
        put = client.put(PATH, json={"versions": {"v1": 100 - share, "v2": share}})
        assert put.json()["versions"] == {"v1": 100 - share, "v2": share}
        now = {user for user in users if version(ask(client, session=user)) == "v2"}
        assert now == {user for user in users if bucket_of("sql", user) < 100 * share}
        assert on_new <= now
        on_new = now
    back = client.post("/v1/adapters/sql/rollback")
    assert back.json()["versions"] == {"v1": 100, "v2": 0}
    assert {version(ask(client, session=user)) for user in users} == {"v1"}
    assert version(ask(client, "sql@v2")) == "v2"  # pinned
    told = client.get(PATH).json()
    assert [state["versions"].get("v2") for state in told["history"]] == [5, 50, 100]
    assert (told["why"], told["revision"]) == ("rollback", 4)
    assert set(told["digests"]) == {"v1", "v2"}
    assert "--state-dir" in told["note"]


def test_new_shares_keep_the_guard_until_it_is_null(client):
    limits = {"error_rate": 0.02, "min_requests": 200}
    assert client.put(PATH, json={"versions": {"v1": 100}}).json()["guard"] is None
    given = {"versions": {"v1": 95, "v2": 5}, "guard": limits}
    assert client.put(PATH, json=given).json()["guard"] == limits
    raised = {"versions": {"v1": 50, "v2": 50}}
    assert client.put(PATH, json=raised).json()["guard"] == limits
    assert client.put(PATH, json={**raised, "guard": {"ttft_s": 2.5}}).json()["guard"] == {
        "ttft_s": 2.5,
        "min_requests": 20,
    }
    assert client.put(PATH, json={**raised, "guard": None}).json()["guard"] is None
    assert client.put(PATH, json=raised).json()["guard"] is None


def test_the_answer_names_version_and_files_and_the_model_as_asked(client):
    client.put(PATH, json={"versions": {"v2": 100}})
    digest = client.get(PATH).json()["digests"]["v2"]
    answer = ask(client)
    assert answer.json()["model"] == "sql"
    assert answer.json()["system_fingerprint"] == digest[:12]
    assert ask(client, "sql@v2").json()["model"] == "sql@v2"
    stream = ask(client, stream=True)
    assert version(stream) == "v2"
    chunk = json.loads(stream.text.partition("data: ")[2].partition("\n")[0])
    assert chunk["system_fingerprint"] == digest[:12]
    chat = {"model": "sql", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert version(client.post("/v1/chat/completions", json=chat)) == "v2"


def test_a_weighted_sum_names_the_versions_of_its_parts(client):
    client.put(PATH, json={"versions": {"v2": 100}})
    answer = ask(client, None, adapters=[{"name": "sql", "weight": 0.5}, {"name": "sql@v1"}])
    assert version(answer) == "sql@v2, sql@v1"
    assert len(answer.json()["system_fingerprint"]) == 12
    assert version(ask(client, None, adapters=[{"name": "sql"}])) == "v2"


@pytest.mark.parametrize("field", ["user", "prompt_cache_key", "safety_identifier"])
def test_the_body_may_name_the_user(client, field):
    client.put(PATH, json={"versions": {"v1": 50, "v2": 50}})
    for user in ("a", "b", "c", "d"):
        want = "v2" if bucket_of("sql", user) < 5000 else "v1"
        assert version(ask(client, **{field: user})) == want


def test_models_list_versions_and_rollouts(client):
    client.put(PATH, json={"versions": {"v1": 100}})
    names = [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert {"sql", "sql@v1", "sql@v2"} <= set(names)
    assert client.get("/v1/models/sql@v1").status_code == 200
    assert client.get("/v1/adapters/sql@v1").json()["name"] == "sql@v1"


def test_a_version_with_a_share_is_not_unloaded(client):
    client.put(PATH, json={"versions": {"v1": 95, "v2": 5}})
    gone = client.delete("/v1/loras/sql@v2")
    assert gone.status_code == 400
    assert "5%" in gone.json()["error"]["message"]
    assert client.delete(PATH).json()["versions"] == {}
    assert client.delete("/v1/loras/sql@v2").status_code == 200
    assert version(ask(client)) is None


WRONG = [
    ({"versions": {"v1": 95, "v9": 5}}, "'v9'"),
    ({"versions": {"v1": 120}}, "[0, 100]"),
    ({"versions": {"v1": 60, "v2": 60}}, "got 120"),
    ({"versions": {"v1": "all"}}, "number"),
    ({"versions": {}}, "at least one"),
    ({"versions": [["v1", 100]]}, "versions"),
    ({}, "versions"),
    ({"versions": {"v1": 100}, "gaurd": {}}, "'gaurd'"),
    ({"versions": {"v1": 100}, "guard": {"error_rate": 2}}, "error_rate"),
    ({"versions": {"v1": 100}, "guard": {}}, "limit"),
]


@pytest.mark.parametrize(("body", "named"), WRONG, ids=range(len(WRONG)))
def test_wrong_rollouts_are_400_and_change_nothing(client, body, named):
    client.put(PATH, json={"versions": {"v1": 100}})
    answer = client.put(PATH, json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert client.get(PATH).json()["revision"] == 1
    assert version(ask(client)) == "v1"


def test_no_rollout_no_way_back_and_names_that_are_none(client):
    assert client.post("/v1/adapters/sql/rollback").status_code == 404
    told = client.get(PATH)
    assert (told.status_code, "v1, v2" in told.text) == (404, True)
    client.put(PATH, json={"versions": {"v1": 100}})
    back = client.post("/v1/adapters/sql/rollback")
    assert back.status_code == 409
    assert "no earlier version" in back.json()["error"]["message"]
    for name in ("sql@v1", "fake-base", "nope", "@", "sql@"):
        put = client.put(f"/v1/adapters/{name}/rollout", json={"versions": {"v1": 100}})
        assert put.status_code == 400, name


@pytest.mark.parametrize("name", ["sql@", "@v1", "sql@@v1", "sql@v1@v2", "fake-base@v1", "sql@.."])
def test_games_with_names(client, name):
    body = {"lora_name": name, "lora_path": "sql"}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert ask(client, name).status_code == 404


def test_the_admin_changes_and_a_tenant_sees_its_own(tmp_path):
    root = write_fake_adapters(tmp_path / "root", "sql", "sql-2")
    tenants = (
        Tenant("follower", frozenset({"sql"})),
        Tenant("tester", frozenset({"sql", "sql@v2"})),
        Tenant("other", frozenset({"law"})),
    )
    settings = HttpSettings(tenants=tenants, admin_keys=("root",), enable_runtime_lora=True)
    engine = FakeEngine(root)
    engine.registry.load("sql@v1", "sql")
    engine.registry.load("sql@v2", "sql-2")
    with client_of(create_app(engine, settings)) as client:

        def as_key(key, method, path, **more):
            headers = {"Authorization": f"Bearer {key}"}
            return client.request(method, path, headers=headers, **more)

        body = {"versions": {"v1": 100}}
        assert as_key("follower", "PUT", PATH, json=body).status_code == 403
        assert as_key("follower", "POST", "/v1/adapters/sql/rollback").status_code == 403
        assert as_key("follower", "DELETE", PATH).status_code == 403
        assert as_key("root", "PUT", PATH, json=body).status_code == 200
        assert as_key("follower", "GET", PATH).status_code == 200
        assert as_key("other", "GET", PATH).status_code == 404
        asked = {"prompt": "x", "max_tokens": 1}
        status = {
            (key, model): as_key(
                key, "POST", "/v1/completions", json={"model": model, **asked}
            ).status_code
            for key in ("follower", "tester", "other")
            for model in ("sql", "sql@v2")
        }
    assert status == {
        ("follower", "sql"): 200,
        ("follower", "sql@v2"): 404,
        ("tester", "sql"): 200,
        ("tester", "sql@v2"): 200,
        ("other", "sql"): 404,
        ("other", "sql@v2"): 404,
    }


def test_a_version_that_is_not_loaded_is_no_model_that_does_not_exist(tmp_path):
    """As after a restart whose journal found other files."""
    engine = FakeEngine(write_fake_adapters(tmp_path / "root", "sql"))
    engine.registry.load("sql@v1", "sql")
    with client_of(create_app(engine, HttpSettings(enable_runtime_lora=True))) as client:
        assert client.put(PATH, json={"versions": {"v1": 100}}).status_code == 200
        engine.registry.unload("sql@v1")
        answer = ask(client)
        assert answer.status_code == 503
        assert "'sql@v1' has a share of 'sql' and is not loaded" in answer.text
        assert ask(client, "sql@v1").status_code == 404
        engine.registry.refuse("sql@v1", "Its files have changed.")
        answer = ask(client)
        assert (answer.status_code, "files have changed" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (AdapterNotFound("sql@v9", ()), 400, "sql@v9"),
        (AdapterRejected("its files have changed"), 400, "its files have changed"),
        (RegistryBusy("other loads are under way", 2.0), 503, "other loads are under way"),
        (OSError(28, "No space left on device"), 503, "nothing has changed: No space left"),
    ],
)
def test_a_change_that_fails_is_told_and_changes_nothing(
    tmp_path, monkeypatch, error, status, said
):
    engine = FakeEngine(write_fake_adapters(tmp_path / "root", "sql"))

    def fail(*given):
        raise error

    monkeypatch.setattr(engine.rollouts, "end", fail)
    settings = HttpSettings(enable_runtime_lora=True)
    with client_of(create_app(engine, settings)) as client:
        client.post("/v1/load_lora_adapter", json={"lora_name": "sql@v1", "lora_path": "sql"})
        assert client.put(PATH, json={"versions": {"v1": 100}}).status_code == 200
        answer = client.delete(PATH)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
        assert client.get(PATH).json()["versions"] == {"v1": 100}
