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
    assert policy["img-src"] == "data:"
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
    want = {"prompt": "once", "adapters": {"sql": "how many?"}, "images": {}}
    assert got == {"chats": True, "sees": False, "docs": True, **want}


def test_facts_hold_the_images_of_examples(lora_dir, tmp_path):
    engine, file = FakeEngine(lora_dir), tmp_path / "a.png"
    engine.images = object()
    file.write_bytes(b"pixels")
    images = {"": (file,), "sql": (file, file), "law": (file,)}
    settings = HttpSettings(demo=True, tenants=(Tenant("k", adapters=frozenset({"sql"})),))
    app = create_app(engine, settings, Examples("once", {"sql": "?"}, images))
    with client_of(app) as client:
        got = client.get("/demo/facts", headers={"Authorization": "Bearer k"}).json()
    url = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    assert (got["sees"], got["images"]) == (True, {"": [url], "sql": [url, url]})


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
globalThis.document = Object.assign(new Element("document"), {
  getElementById: element, createElement: (tag) => new Element(tag) });
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
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
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
        assert asked.sampling.structured_outputs.whitespace_pattern == " ?"
    assert wrong["status"].startswith("The schema is no JSON: ")
    assert wrong["answers"] == []


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


# What a server with a vision model and heads answers; `loaded` has its head on the first use only.
HEADED = """
const drawn = [];
const pen = new Proxy({ measureText: (text) => ({ width: 8 * text.length }) }, {
  get: (own, name) => own[name] ?? ((...given) => drawn.push([name, ...given])) });
Element.prototype.getContext = () => pen;
globalThis.Image = class { addEventListener(_, f) { this.f = f; } setAttribute(_, url) {
  Object.assign(this, { url, width: 64, height: 32 }); this.f(); } };
globalThis.FileReader = class { addEventListener(name, f) { if (name === "load") this.f = f; }
  readAsDataURL(file) { this.result = "data:image/png;base64," + file.name; this.f(); } };
const sent = [];
const box = { label: "face", score: 0.9, box: [0.25, 0.5, 0.75, 1] };
const answers = {
  "v1/models": { data: [{ id: "base", parent: null }, { id: "count", parent: "base", head: {} },
    { id: "loaded", parent: "base" }] },
  "demo/facts": { chats: true, sees: true, docs: false, prompt: "look", adapters:
    { count: "How many?" }, images: { count: ["data:image/png;base64,example"] } },
};
globalThis.fetch = async (path, options) => {
  if (answers[path]) return { ok: true, json: async () => answers[path] };
  const body = JSON.parse(options.body);
  sent.push([path, body.model, body.messages[0].content]);
  if (path === "classify") {
    const found = { label: "3", probs: [0.1, 0.9], num_classes: 2 };
    const boxes = body.model === "loaded" ? { boxes: [box] } : {};
    return { ok: true, json: async () => ({ data: [{ ...found, ...boxes }] }) };
  }
  const param = body.model === "loaded" ? "stream" : "model";
  return { ok: false, status: 400, json: async () => ({ error: { message: "no", param } }) };
};
"""
DROP = """
(async () => {
  while (!element("prompt").value) await new Promise((done) => setTimeout(done, 5));
  const first = element("images").children.map((one) => one.src);
  for (const image of [...element("images").children]) image.listeners.click();
  const files = [{ type: "image/png", name: "dropped" }, { type: "text/plain", name: "not" }];
  await document.listeners.drop({ preventDefault() {}, dataTransfer: { files } });
  await new Promise((done) => setTimeout(done, 5));
  const told = element("status").textContent;
  for (const label of element("adapters").children.slice(1)) label.children[0].checked = true;
  await element("form").listeners.submit({ preventDefault() {} });
  const texts = (place) => place.children.map((child) => child.textContent);
  console.log(JSON.stringify({
    first, told, asked: sent, answers: element("answers").children.map(texts),
    box: drawn.find(([name]) => name === "strokeRect"),
  }));
})();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node to run JavaScript with")
def test_dropped_images_are_asked_about_and_heads_answer_with_boxes(tmp_path):
    script = re.findall(r"<script>(.*?)</script>", PAGE.read_text(), re.DOTALL)[0]
    page = BROWSER + HEADED + script.replace('"use strict";', "") + DROP
    (tmp_path / "page.js").write_text(page)
    command = ["node", str(tmp_path / "page.js"), "", "", ""]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    got = json.loads(done.stdout)
    assert got["first"] == ["data:image/png;base64,example"]
    assert got["told"] == "not: no image, left out"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,dropped"}}
    content = [image, {"type": "text", "text": "How many?"}]
    ways = [(path, model) for path, model, _ in got["asked"]]
    chat = "v1/chat/completions"
    assert sorted(ways) == sorted(
        [(chat, "base"), (chat, "loaded"), ("classify", "count"), ("classify", "loaded")]
    ), "a head that is known is asked at once, another after its refusal to stream"
    assert all(asked == content for *_, asked in got["asked"])
    _, (_, rate, text), (_, _, found, _) = got["answers"]
    assert rate.startswith("task head, ")
    assert text.startswith("3\n")
    assert found == "face 90 %"
    assert got["box"] == ["strokeRect", 80, 80, 160, 80], "64 x 32 pixels are shown as 320 x 160"
