"""The demo page: off by default, one file, nothing foreign, text as text."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest
from support.doubles.fake_engine import BOS, FakeEngine, letters
from support.processes.http_server import client_of, serve_app

from serving.api.examples import Examples
from serving.http.app import create_app
from serving.http.routes.demo import PAGE
from serving.http.settings import HttpSettings, Tenant


@pytest.fixture(scope="module")
def page():
    with client_of(create_app(FakeEngine(), HttpSettings(demo=True, api_keys=("k",)))) as client:
        return client.get("/")


def test_off_unless_asked_for(client):
    assert client.get("/").status_code == 404


def test_policy_allows_only_the_page_s_own_script_and_server(page):
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(p.split(" ", 1) for p in page.headers["content-security-policy"].split("; "))
    scripts = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) == page.text.count("<script") == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_model_output_is_text_only_and_nothing_comes_from_elsewhere(page):
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in page.text
    assert "textContent" in page.text
    assert not re.search(r"(src|href)\s*=|https?://|\bon\w+=", page.text)


def test_facts_need_the_key_and_name_only_what_it_may_use(lora_dir):
    settings = HttpSettings(demo=True, tenants=(Tenant("k", adapters=frozenset({"sql"})),))
    examples = Examples("once", {"sql": "how many?", "law": "a case"})
    with client_of(create_app(FakeEngine(lora_dir), settings, examples)) as client:
        assert client.get("/demo/facts").status_code == 401
        got = client.get("/demo/facts", headers={"Authorization": "Bearer k"}).json()
    adapters = {"sql": "how many?"}
    assert got == {"chats": True, "docs": True, "prompt": "once", "adapters": adapters}


# Just enough of a browser: a tree of elements, and fetch against the server under test.
BROWSER = """
const named = {};
class Element {
  constructor(tag) {
    Object.assign(this, { tag, value: "", textContent: "", children: [], listeners: {} });
  }
  addEventListener(name, f) { this.listeners[name] = f; }
  setAttribute(name, value) { this[name] = value; }
  replaceChildren() { this.children = []; }
  append(child) { this.children.push(child); }
}
const element = (id) => named[id] ??= new Element("named");
globalThis.document = { getElementById: element, createElement: (tag) => new Element(tag) };
const plain = globalThis.fetch;
globalThis.fetch = (path, options) => plain(process.argv[2] + "/" + path, options);
element("tokens").value = "5";
element("temperature").value = "0";
element("key").value = process.argv[3];
element("schema").value = process.argv[4];
"""
CLICK = """
(async () => {
  const begun = () => element("prompt").value || element("status").textContent;
  while (!begun()) await new Promise((done) => setTimeout(done, 20));
  await element("form").listeners.submit({ preventDefault() {} });
  const texts = (place) => place.children.map((child) => child.textContent);
  console.log(JSON.stringify({
    status: element("status").textContent,
    prompt: element("prompt").value,
    links: element("links").children.map((one) => one.href).filter(Boolean),
    examples: texts(element("examples")),
    adapters: element("adapters").children.slice(1).map((label) => label.children[1].textContent),
    answers: element("answers").children.map(texts),
  }));
})();
"""


def use_page(tmp_path, url: str, key: str, schema: str = "") -> dict:
    script = re.findall(r"<script>(.*?)</script>", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "page.js").write_text(BROWSER + script.replace('"use strict";', "") + CLICK)
    command = ["node", str(tmp_path / "page.js"), url, key, schema]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return json.loads(done.stdout)


def answer_of(prompt: bytes, adapter: str | None) -> str:
    return "".join(map(chr, letters(list(prompt), adapter, 0, 5)))


@pytest.mark.skipif(not shutil.which("node"), reason="no node to run JavaScript with")
@pytest.mark.parametrize("key", ["k", "wrong"])
def test_the_page_chats_with_base_and_adapter_by_a_fitting_example(lora_dir, tmp_path, key):
    settings = HttpSettings(demo=True, api_keys=("k",))
    examples = Examples("once", {"gone": "x", "sql": "hi", "law": "a case"})
    with serve_app(create_app(FakeEngine(lora_dir), settings, examples)) as url:
        got = use_page(tmp_path, url, key)
    if key == "wrong":
        assert got["status"] == "The API key is wrong."
        assert got["answers"] == []
        return
    assert got["adapters"] == ["law", "sql"]
    assert (got["prompt"], got["examples"]) == ("hi", ["Examples:", "sql", "law"])
    assert got["links"] == ["docs", "v1/models", "metrics"]
    asked = b"[user]hi[assistant]"
    (base, rate, text), (name, _, other) = got["answers"]
    assert (base, name) == ("fake-base (base)", "sql")
    assert (text, other) == (answer_of(asked, None), answer_of(asked, "sql"))
    assert rate.startswith("5 tokens, ")


@pytest.mark.skipif(not shutil.which("node"), reason="no node to run JavaScript with")
def test_a_schema_binds_every_answer(lora_dir, tmp_path):
    engine, schema = FakeEngine(lora_dir), {"type": "object", "properties": {"a": {}}}
    with serve_app(create_app(engine, HttpSettings(demo=True), Examples("once"))) as url:
        got = use_page(tmp_path, url, "", json.dumps(schema))
        wrong = use_page(tmp_path, url, "", "{")
    assert len(got["answers"]) == len(engine.submitted) == 2
    for asked in engine.submitted:
        assert json.loads(asked.sampling.structured_outputs.text) == schema
    assert all("JSON" in rate for _, rate, _ in wrong["answers"])


@pytest.mark.skipif(not shutil.which("node"), reason="no node to run JavaScript with")
def test_a_model_without_a_template_is_asked_to_go_on(lora_dir, tmp_path, monkeypatch):
    engine = FakeEngine(lora_dir)
    monkeypatch.setattr(engine.tokenizer, "has_chat_template", False, raising=False)
    with serve_app(create_app(engine, HttpSettings(demo=True), Examples("once"))) as url:
        got = use_page(tmp_path, url, "")
    assert (got["prompt"], got["examples"]) == ("once", [])
    (_, _, text), (name, _, _) = got["answers"]
    assert name == "law"
    prompt = [BOS, *b"once"]
    assert text == "".join(map(chr, letters(prompt, None, 0, 5)))
