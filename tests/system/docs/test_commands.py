"""Commands and snippets of the pages: each one runs, or at least parses."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE
from support.processes.server_process import ROOT

from serving.http.access.key_hash import new_key
from serving.launch import read_options

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/how-to").glob("*.md"))
NAMING = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
NAMING += [
    *sorted((ROOT / "docs/concepts").glob("*.md")),
    *sorted((ROOT / "docs/benchmarks").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIVE = ROOT / "README.md", ROOT / "docs/getting-started.md"
PEERS = ("sglang.",)  # modules of other servers, whose commands a page compares with ours
# Steps of few tokens, no grammars: by default, an engine compiles eight times as many programs.
FEW_PROGRAMS = """
import functools, serving
few = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "structured_outputs": False}
serving.Engine = functools.partial(serving.Engine, **few)
"""


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def command_lines(page: Path) -> list[str]:
    """Lines of a page's shell blocks, continued lines joined, loops and comments left out."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)
    words = ("make ", "python", ".venv/bin/", "pip ", "curl ", "vllm ")
    return [line.partition("  #")[0] for line in text.splitlines() if line.startswith(words)]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def check_line(line: str) -> None:
    """Fail unless the command could start: its target, module, flags or extra exist."""
    line = line.removesuffix("&")
    words = shlex.split(line.replace(".venv/bin/", "").replace("python3.12", "python"))
    if words[0] == "make":
        assert words[1] in make_targets(), line
    elif words[0] == "pip":
        assert set(re.findall(r"\[([\w,]+)\]", line)) <= extras(), line
    elif words[:2] == ["python", "-m"] and words[2] == "serving.launch":
        read_options(words[3:], {})
    elif words[:2] == ["python", "-m"] and not words[2].startswith(PEERS):
        assert importlib.util.find_spec(words[2]), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_could_start(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = {"id": "team-a", "hash": new_key("team-a")[1]}  # as a command of the page makes it
    (tmp_path / "keys").write_text(json.dumps(line))
    for line in command_lines(page):
        check_line(line)


def test_a_wrong_command_is_found():
    wrong = ("make nothing", "pip install '.[no]'", "python -m serving.launch M --no-such-flag")
    for line in wrong:
        with pytest.raises((AssertionError, SystemExit)), contextlib.redirect_stderr(io.StringIO()):
            check_line(line)


def test_commands_in_text_name_targets_modules_and_flags():
    for page in NAMING:
        for line in re.findall(r"`((?:make|python -m) [^`]+)`", page.read_text()):
            check_line(re.sub(r"\bN\b", "2", line))  # N is any number


@pytest.fixture(scope="module")
def server(made_server: str) -> str:
    """Port of the server that `make serve` starts."""
    return made_server.rpartition(":")[2]


def answers_of_block(text: str, port: str) -> list[dict]:
    """Run the curls of a shell block and return what they print."""
    starts = r"^(?:make|python|\.venv)(?:.*\\\n)*.*\n"
    script = re.sub(starts, "", text, flags=re.MULTILINE).replace("8000", port)
    script = script.replace("curl ", "curl --silent --show-error --fail-with-body ")
    script = script.replace('"fox"', '"law"')  # for an adapter that the reader trains
    done = subprocess.run(["bash", "-e"], input=script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, script + done.stdout + done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text.startswith("{"):
        answer, end = decoder.raw_decode(text)
        found.append(answer)
        text = text[end:].strip()
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("page", LIVE, ids=lambda page: page.stem)
def test_curls_of_a_page_are_answered(page, server):
    live = [text for text in blocks(page, "bash") if "curl " in text]
    assert live
    answers = [answer for text in live for answer in answers_of_block(text, server)]
    assert not any("error" in answer for answer in answers)
    if page.name == "README.md":
        said = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert ["Alarm-Update" in text for text in said] == [False, True, True]


@pytest.mark.parametrize("number", [0, 1], ids=["openai client", "engine"])
def test_python_snippets_of_the_readme_run(number, server):
    """In a process of its own, with an engine of one program."""
    snippets = blocks(ROOT / "README.md", "python")
    assert len(snippets) == 2
    text = snippets[number].replace("8000", server)
    command = [sys.executable, "-c", FEW_PROGRAMS + text if number else text]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_page_of_grouped_lora_adds_each_row_s_adapter(monkeypatch):
    monkeypatch.chdir(ROOT)
    (snippet,) = blocks(ROOT / "docs/how-to/use-grouped-lora.md", "python")
    names: dict[str, Any] = {}
    exec(snippet, names)
    x, w, y = (np.asarray(names[name]) for name in ("x", "w", "y"))
    want = x @ w
    for row, (a, b, scaling) in enumerate(names["adapters"]):
        want[row] += scaling * (x[row] @ np.asarray(a).T) @ np.asarray(b).T
    np.testing.assert_allclose(y, want, **TOLERANCE["float32"])
    assert len({len(a) for a, _, _ in names["adapters"]}) == 2  # ranks differ


def test_code_and_tests_of_the_papers_are_where_the_page_says():
    """A cell names paths; one without a folder lies beside the one before it."""
    rows = (ROOT / "docs/reference/papers.md").read_text().splitlines()
    cells = [re.findall(r"`([^` ]+)`", cell) for row in rows for cell in row.split("|")[2:4]]
    assert sum(map(len, cells)) > 60
    for names in cells:
        folder = ROOT
        for name in names:
            path = ROOT / name if "/" in name else folder / name
            folder = path.parent
            assert path.exists(), name
