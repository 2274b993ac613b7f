"""The audit log: who loaded, was refused, or had a wrong key; bounded, and no secret in it."""

import json
import os
import stat

from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.access.audit import AuditLog
from serving.http.app import create_app
from serving.http.settings import HttpSettings, Tenant


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_change_and_refusal_is_a_line(lora_dir, tmp_path):
    path = tmp_path / "audit"
    tenants = (
        Tenant("secret-a", frozenset({"law"}), id="team-a"),
        Tenant("secret-r", id="ops", roles=frozenset({"admin"})),
    )
    settings = HttpSettings(tenants=tenants, enable_runtime_lora=True, audit_log=str(path))
    with client_of(create_app(FakeEngine(lora_dir), settings)) as client:

        def post(route: str, key: str, body: dict) -> int:
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": f"id of {key}"[:9]}
            headers["X-Request-Id"] = headers["X-Request-Id"].replace(" ", "-")
            return client.post(route, json=body, headers=headers).status_code

        body = {"lora_name": "new", "lora_path": "sql"}
        assert post("/v1/load_lora_adapter", "secret-a", body) == 403
        assert post("/v1/load_lora_adapter", "secret-r", body) == 200
        assert post("/load_lora_adapter", "secret-r", body) == 400
        assert post("/v1/unload_lora_adapter", "secret-r", {"lora_name": "new"}) == 200
        assert post("/unload_lora_adapter", "secret-r", {"lora_name": "a\nb"}) == 400
        assert post("/v1/loras", "wrong", {}) == 401
        assert client.get("/v1/models").status_code == 401
    told = [(x["action"], x["key"], x["adapter"], x["status"]) for x in lines(path)]
    assert told == [
        ("refused", "team-a", None, 403),
        ("load", "ops", "new", 200),
        ("load", "ops", "new", 400),
        ("unload", "ops", "new", 200),
        ("unload", "ops", None, 404),
        ("failed key", "", None, 401),
        ("refused", "", None, 401),
    ]
    assert lines(path)[1]["request_id"] == "id-of-sec"
    assert lines(path)[0]["detail"] == "POST /v1/load_lora_adapter"
    assert all(x["time"].endswith("+00:00") for x in lines(path))
    assert "secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_refusals_do_not_fill_the_disk_but_changes_are_always_told(tmp_path):
    now = [0.0]
    path = tmp_path / "audit"
    log = AuditLog(str(path), clock=lambda: now[0])
    for _ in range(500):
        log.refusal("failed key", key="", status=401)
    assert len(lines(path)) == 50
    log.write("load", key="ops", status=200, adapter="x")
    assert lines(path)[-1]["suppressed_before"] == 450
    now[0] = 1.0
    log.refusal("failed key", key="", status=401)
    assert "suppressed_before" not in lines(path)[-1]
    assert len(lines(path)) == 52


def test_a_moved_file_is_begun_again_and_a_bad_one_stops_nobody(tmp_path, caplog):
    path = tmp_path / "audit"
    log = AuditLog(str(path))
    log.check()
    os.rename(path, tmp_path / "audit.1")
    log.write("load", key="ops", status=200)
    assert len(lines(path)) == 1
    bad = AuditLog(str(tmp_path / "no" / "audit"))
    bad.write("load", key="ops", status=200)
    assert "cannot be written" in caplog.text
    AuditLog().write("load", key="ops", status=200)
