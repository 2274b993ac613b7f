"""The demo page: off by default, one file, nothing foreign, text as text."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest
from fake_engine import BOS, FakeEngine, letters
from http_server import client_of, serve_app

from serving.http.app import create_app
from serving.http.demo import PAGE
from serving.http.settings import HttpSettings


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


# Just enough of a browser: elements by id, and fetch against the server under test.
BROWSER = """
const elements = {};
const element = (id) => elements[id] ??= {
  id, value: "", textContent: "", children: [], listeners: {},
  addEventListener(name, f) { this.listeners[name] = f; },
  replaceChildren() { this.children = []; },
  append(child) { this.children.push(child); this.value ||= child.value; },
};
globalThis.document = { getElementById: element, createElement: () => ({}) };
const plain = globalThis.fetch;
globalThis.fetch = (path, options) => plain(process.argv[2] + "/" + path, options);
Object.assign(element("prompt"), { value: "hi" });
Object.assign(element("tokens"), { value: "5" });
Object.assign(element("temperature"), { value: "0" });
element("key").value = process.argv[3];
"""
CLICK = """
(async () => {
  await element("form").listeners.submit({ preventDefault() {} });
  const shown = Object.values(elements).map((e) => [e.id, e.textContent]);
  const options = element("adapter").children.map((o) => o.textContent);
  console.log(JSON.stringify({ shown: Object.fromEntries(shown), options }));
})();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node to run JavaScript with")
@pytest.mark.parametrize("key", ["k", "wrong"])
def test_the_page_compares_base_and_adapter(lora_dir, tmp_path, key):
    script = re.findall(r"<script>(.*?)</script>", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "page.js").write_text(BROWSER + script.replace('"use strict";', "") + CLICK)
    settings = HttpSettings(demo=True, api_keys=("k",))
    with serve_app(create_app(FakeEngine(lora_dir), settings)) as url:
        command = ["node", str(tmp_path / "page.js"), url, key]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    got = json.loads(done.stdout)
    if key == "wrong":
        assert got["shown"]["status"] == "The API key is wrong."
        assert got["options"] == []
        return
    assert got["options"] == ["law", "sql"]
    ids = [BOS, *b"hi"]
    assert got["shown"]["text-0"] == "".join(map(chr, letters(ids, None, 0, 5)))
    assert got["shown"]["text-1"] == "".join(map(chr, letters(ids, "law", 0, 5)))
    assert got["shown"]["name-1"] == "law"
    assert got["shown"]["rate-0"].startswith("5 tokens, ")
