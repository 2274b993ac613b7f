"""Log lines: what operators and scripts look for."""

import base64
import io
import json
import logging
import shlex
import subprocess
import sys
import time

import pytest
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.kept_logging import kept_logging
from support.waiting import wait_until

from serving.api.examples import Examples
from serving.engine.metrics.logs import (
    PeriodicStats,
    adapter_table,
    configure,
    folder_lines,
    ready_lines,
    route_lines,
)
from serving.engine.metrics.stats import EngineStats
from serving.http.app import create_app


def test_lines_have_level_time_and_place(capsys):
    configure("info")
    logging.getLogger("serving.x").info("hello")
    logging.getLogger("serving.x").debug("quiet")
    logging.getLogger("somebody.else").info("quiet")
    logging.getLogger("uvicorn.error").info("Application startup complete.")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert out[0].startswith("INFO ")
    assert out[0].endswith("hello")
    assert "[test_logs.py:" in out[0]
    assert out[1].endswith("Application startup complete.")


def test_a_locale_without_chinese_gets_escapes_and_no_traceback(monkeypatch, capsys):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    configure("info")
    logging.getLogger("serving.x").info('{"content": "明天"}')
    sys.stdout.flush()
    assert raw.getvalue().endswith(b'{"content": "\\u660e\\u5929"}\n')
    assert capsys.readouterr().err == ""


def test_probes_are_not_in_the_access_log(capsys):
    configure("info", ("/quiet",))
    access = logging.getLogger("serving.access")
    for path in ("/health", "/metrics?x=1", "/quiet?y", "/v1/models"):
        access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
    out = capsys.readouterr().out
    assert "/v1/models" in out
    assert "/health" not in out
    assert "/metrics" not in out
    assert "/quiet" not in out


def test_adapter_table_has_a_row_per_adapter(tmp_path):
    engine = FakeEngine(write_fake_adapters(tmp_path / "r", "sql", "a-longer-name"))
    assert adapter_table(engine.registry.entries()) == ["Adapters: none loaded."]
    for name in ("sql", "a-longer-name"):
        engine.registry.load(name, name)
    header, *rows = adapter_table(engine.registry.entries())
    assert header.split() == ["adapter", "kind", "rank", "modules", "MB", "sha256"]
    assert rows[0].split() == ["a-longer-name", "lora", "4", "q_proj", "1.05", "0" * 12]
    assert header.index("kind") == rows[1].index("lora")


def test_adapters_of_the_folder_are_named_but_not_all_of_thousands():
    assert folder_lines(set()) == []
    assert ": a, b. model=NAME" in folder_lines({"b", "a"})[0]
    line = folder_lines([f"a{i:04}" for i in range(1000)])[0]
    assert "a0019 and 980 more" in line
    assert "a0020" not in line


def test_routes_are_listed():
    lines = route_lines(create_app(FakeEngine()))
    assert "Route: /v1/completions, Methods: POST" in lines
    assert "Route: /ping, Methods: GET, POST" in lines
    assert lines == sorted(lines)


def tried(*lines: str) -> tuple[str, dict]:
    """The path and the body of the printed command."""
    words = shlex.split(next(line for line in lines if line.startswith("curl ")))
    return words[1], json.loads(words[words.index("-d") + 1])


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_printed_command_is_a_valid_request(needs_key):
    ready, curl = ready_lines("http://127.0.0.1:8000", "it's", needs_key)
    assert ready.startswith("Ready: http://127.0.0.1:8000 serves it's.")
    url, body = tried(curl)
    assert url == "http://127.0.0.1:8000/v1/completions"
    assert (body["model"], body["prompt"]) == ("it's", "Once upon a time")
    assert ("Authorization: Bearer $SERVING_API_KEY" in shlex.split(curl)) == needs_key


def test_ready_asks_what_the_model_can_answer():
    url, names = "http://127.0.0.1:8000", ["law", "sql"]
    examples = Examples("go on", {"gone": "x", "sql": "how many?", "law": "a case"})
    lines = ready_lines(url, "base", False, names, examples, chats=True)
    place, body = tried(*lines)
    assert place.endswith("/v1/chat/completions")
    assert body["model"] == "sql"
    assert body["messages"] == [{"role": "user", "content": "how many?"}]
    assert lines[-1] == 'Another model answers to its name: "model": "base".'
    page = ready_lines(url, "base", False, names, examples, chats=True, demo=True)
    assert page == [*lines, "The demo page: http://127.0.0.1:8000/"]
    assert tried(*ready_lines(url, "base", False, ["x"], examples))[1]["prompt"] == "go on"


def test_ready_sends_the_images_of_the_example(tmp_path):
    """The printed line, run by a shell whose curl shows what it is given."""
    files = [tmp_path / "it's a.png", tmp_path / "b.png"]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 100)  # more than one line of base64
    examples = Examples("what's this?", {}, {"": tuple(files)})
    _, line = ready_lines("http://127.0.0.1:8000", "base", False, [], examples, chats=True)
    script = f'curl() {{ printf %s "${{@: -1}}"; }}; {line}'
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    *images, text = json.loads(done.stdout)["messages"][0]["content"]
    assert text == {"type": "text", "text": "what's this?"}
    urls = [image["image_url"]["url"].partition("data:image/png;base64,")[2] for image in images]
    assert [base64.b64decode(url) for url in urls] == [file.read_bytes() for file in files]


def test_ready_names_an_adapter_to_ask_for():
    assert ready_lines("unix:///tmp/one", "base", True, ["law"]) == [
        "Ready: unix:///tmp/one serves base."
    ]
    *_, last = ready_lines("http://127.0.0.1:8000", "base", False, ["law", "sql"])
    assert last == 'Another model answers to its name: "model": "law".'


class Numbers:
    def __init__(self, *stats: EngineStats):
        self._stats = list(stats)

    def stats(self) -> EngineStats:
        return self._stats.pop(0) if len(self._stats) > 1 else self._stats[0]


def test_the_periodic_line_has_rates_and_places():
    busy = EngineStats(
        running=3,
        waiting=1,
        prompt_tokens=100,
        generation_tokens=55,
        kv_usage=0.125,
        prefix_queries=200,
        prefix_hits=50,
        adapter_slots_used=2,
        adapter_slots_total=16,
    )
    periodic = PeriodicStats(Numbers(busy), every_s=10.0)
    assert periodic.line() == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.5 tokens/s, "
        "Running: 3 reqs, Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, "
        "adapters resident 2/16"
    )


def test_an_idle_engine_says_nothing():
    done = EngineStats(prompt_tokens=5, generation_tokens=5)
    periodic = PeriodicStats(Numbers(done))
    assert periodic.line() is not None
    assert periodic.line() is None


def test_the_thread_logs_while_busy_and_stops(caplog):
    caplog.set_level(logging.INFO, "serving.engine.metrics.logs")
    with PeriodicStats(Numbers(EngineStats(running=1)), every_s=0.02):
        wait_until(lambda: caplog.records)
    assert "Running: 1 reqs" in caplog.text
    count = len(caplog.records)
    time.sleep(0.06)
    assert len(caplog.records) == count


def test_a_test_leaves_the_logging_of_its_process_as_it_was():
    """A handler left behind would write to the closed output of the test before."""
    root, access = logging.getLogger(), logging.getLogger("serving.access")
    before = root.handlers[:], root.level, logging.getLogger("serving").level, access.filters[:]
    with kept_logging():
        configure("debug", ("/quiet",))
        assert root.handlers != before[0]
    after = root.handlers[:], root.level, logging.getLogger("serving").level, access.filters[:]
    assert after == before
