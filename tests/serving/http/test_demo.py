"""The demo page: off by default, one file, nothing foreign, text as text."""

import base64
import hashlib
import re
import shutil
import subprocess

import pytest
from fake_engine import FakeEngine
from http_server import client_of

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


@pytest.mark.skipif(not shutil.which("node"), reason="no node to parse JavaScript with")
def test_script_parses(tmp_path):
    script = re.findall(r"<script>(.*?)</script>", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)
