"""Security rules that no single module can show."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from support.processes.http_server import client_of

from serving.http.app import create_app
from serving.http.settings import HttpSettings, Tenant

ROOT = Path(__file__).parents[4]
SOURCES = [*ROOT.glob("serving/**/*.py"), *ROOT.glob("src/lora_jax/**/*.py")]
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch", "importlib.util"}
# What the server wrote itself, for itself: SECURITY.md says how each of them is checked first.
TRUSTED = {
    "code_files.py": {"importlib.util"},  # looks where packages lie, and loads nothing
    "gang_stream.py": {"pickle"},
    "joining.py": {"importlib.util"},  # looks whether Ray is installed, and loads nothing
    "kept_steps.py": {"pickle"},
    "lowering.py": {"pickle"},  # over pipes of a process and the one that it started
    "lowering_processes.py": {"pickle"},
    "member.py": {"pickle"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_nothing_unpickles_and_no_route_takes_tensors(real_client):
    assert len(SOURCES) > 50
    unsafe = {path.name: imports(path) & UNSAFE_MODULES for path in SOURCES}
    assert {name: modules for name, modules in unsafe.items() if modules} == TRUSTED
    paths = real_client.get("/openapi.json").json()["paths"]
    assert [path for path in paths if re.search("tensor|pickle|eval|exec|debug", path)] == []


def test_nothing_runs_code_from_files_and_no_check_is_an_assert():
    readers = [*ROOT.glob("src/lora_jax/adapters/formats/peft_*.py")]
    readers += [ROOT / "src/lora_jax/adapters/registry.py"]
    readers += [ROOT / "src/lora_jax/adapters/formats/safetensors_file.py"]
    for path in [*ROOT.glob("serving/http/**/*.py"), *readers]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), path.name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path.name


def test_templates_come_from_the_server_only(real_client, real_lora_dir):
    """Neither a request nor an adapter's folder brings a template of its own."""
    messages = [{"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}]
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    body = {"messages": messages, "max_tokens": 1, "chat_template": attack}
    refused = real_client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "chat_template" in refused.json()["error"]["message"]
    tokens = real_client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    rendered = real_client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "{{ 7 * 7 }} {% raw %}" in rendered
    shutil.copytree(real_lora_dir / "a", real_lora_dir / "templated")
    (real_lora_dir / "templated" / "chat_template.jinja").write_text("{{ 1/0 }}")
    (real_lora_dir / "templated" / "tokenizer_config.json").write_text('{"chat_template": "evil"}')
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answers = [
        real_client.post("/v1/chat/completions", json=body | {"model": model}).json()
        for model in ("a", "templated")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_callers_do_not_share_their_prefix_cache(real_engine):
    """A hit would show in cached_tokens, and in the time to the first token."""
    tenants = (Tenant("one"), Tenant("two"), Tenant("three", salt="s"), Tenant("four", salt="s"))
    prompt = "a prompt of several pages that nobody else has asked for yet"
    with client_of(create_app(real_engine, HttpSettings(tenants=tenants))) as client:

        def cached(key: str, **more) -> int:
            body = {"prompt": prompt, "max_tokens": 2, "model": "a"} | more
            headers = {"Authorization": f"Bearer {key}"}
            answer = client.post("/v1/completions", json=body, headers=headers).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one") == 0
        full = cached("one")
        assert full >= 40
        assert cached("two") == 0
        assert cached("one", cache_salt="mine") == 0
        assert cached("one", cache_salt="mine") == full
        assert cached("one", model="b") == 0
        assert cached("one", model=None) == 0
        assert cached("three") == 0
        assert cached("four") == full
        assert cached("one") == full


def test_request_ids_of_clients_are_never_keys(real_client):
    """Requests with the same id, in flight at the same time, keep their own answers."""
    headers = {"X-Request-Id": "same"}
    bodies = [
        {"prompt": p, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "request_id": "same"}
        for p in ("first", "second")
    ]
    alone = [real_client.post("/v1/completions", json=b).json()["choices"] for b in bodies]
    first = bodies[0] | {"stream": True}
    with real_client.stream("POST", "/v1/completions", json=first, headers=headers) as stream:
        lines = stream.iter_lines()
        text = json.loads(next(lines)[6:])["choices"][0]["text"]
        second = real_client.post("/v1/completions", json=bodies[1], headers=headers).json()
        for line in lines:
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert second["choices"] == alone[1]
    assert text == alone[0][0]["text"]


def test_no_label_comes_from_a_client(real_client):
    for i in range(3):
        body = {"model": f"spam{i}", "prompt": "x", "user": f"spam{i}"}
        real_client.post("/v1/completions", json=body, headers={"X-Request-Id": f"spam{i}"})
        real_client.request(f"SPAM{i}", f"/spam{i}")
    text = real_client.get("/metrics").text
    assert "spam" not in text.lower()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompts_are_never_logged(real_client, caplog, path):
    caplog.set_level(1)
    secret = "correct horse battery staple"
    body = {"prompt": secret, "messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    for more in ({}, {"n": 10**9}, {"stop": 3}, {"whatever": secret}, {"prompt": [secret, 3]}):
        real_client.post(path, json=body | more)
    assert secret not in caplog.text
