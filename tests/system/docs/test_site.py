"""The documentation site: generated tables, navigation, and a build without warnings."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys

import pytest
from support.processes.server_process import ROOT

import serving
from serving.api.config import EngineConfig
from serving.cli.flags import build_parser

SITE = ROOT / "docs/site"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return load("reference")


def test_every_flag_is_in_the_table(reference):
    table = reference.flags()
    shown = [action for action in build_parser()._actions if action.help != argparse.SUPPRESS]
    spellings = {name for action in shown for name in action.option_strings}
    missing = [name for name in spellings - {"-h", "--help"} if f"`{name}`" not in table]
    assert not missing


def test_routes_and_metrics_have_a_meaning(reference):
    for table, known in (
        (reference.routes(), "`POST /v1/chat/completions`"),
        (reference.metrics(), "`vllm:time_to_first_token_seconds`"),
    ):
        rows = [line.split(" | ") for line in table.splitlines()[2:]]
        assert len(rows) > 15
        assert all(row[-1].strip(" |") for row in rows)
        assert any(known in row[0] for row in rows)


def test_metrics_that_pages_name_exist(reference):
    pages = [ROOT / "deploy/README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    # A metric with its labels too, and not the first words of several.
    named = set(re.findall(r"`((?:vllm|lora_jax):\w*[a-z])(?:\{\w+\})?`", text))
    assert len(named) > 40
    known = reference.metrics()
    assert not [name for name in named if f"`{name}`" not in known]


def test_metrics_that_the_code_names_are_in_the_table(reference):
    files = (ROOT / "serving").rglob("*.py")
    named = {
        name
        for file in files
        for name in re.findall(r'"((?:vllm|lora_jax):\w*[a-z])"', file.read_text())
    }
    assert len(named) > 40
    known = reference.metrics()
    assert not [name for name in named if not re.search(rf"`{name}(_total)?`", known)]


def test_names_that_the_page_for_programs_of_vllm_has_exist():
    text = (ROOT / "docs/how-to/from-vllm-llm.md").read_text()
    named = set(re.findall(r"`(\w*Engine)\.(\w+)", text))
    assert {("Engine", "generate"), ("AsyncEngine", "stream")} <= named
    assert not [pair for pair in named if not hasattr(getattr(serving, pair[0]), pair[1])]
    rows = dict(re.findall(r"^\| `(\w+)` \| .*?: (`.*?)(?: \||$)", text, re.MULTILINE))
    of = {"RequestOutput": serving.RequestOutput, "CompletionOutput": serving.Completion}
    for row, kind in of.items():
        for name in re.findall(r"`(\w+)`", rows[row]):
            assert name in kind.__dataclass_fields__ or hasattr(kind, name), name
    (same,) = re.findall(r"^\| (`tensor_parallel_size`.*) \| the same names", text, re.MULTILINE)
    fields = EngineConfig.__dataclass_fields__
    assert not [name for name in re.findall(r"`(\w+)`", same) if name not in fields]


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert not [str(page) for page in pages if str(page) not in nav]


def test_the_check_finds_what_is_broken(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html">x</a><a href="#no">x</a><a href="https://example.org">x</a>'
        '<script src="https://example.org/x.js"></script><h1 id="yes"></h1><a href="#yes">x</a>'
    )
    found = load("check").problems(tmp_path)
    assert found == ["a.html loads https://example.org/x.js", "a.html: b.html", "a.html: #no"]


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    assert load("check").problems(tmp_path) == []
    assert "--max-loras" in (tmp_path / "reference/flags.html").read_text()
    assert "load_adapter" in (tmp_path / "reference/python.html").read_text()
