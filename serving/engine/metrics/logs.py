"""Log format and status lines of the server; prompts are never logged."""

import importlib.metadata
import io
import json
import logging
import platform
import shlex
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI

from lora_jax.adapters.registry import AdapterEntry
from serving.api.examples import Examples
from serving.engine.metrics.stats import EngineStats

LINE = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
TIME = "%m-%d %H:%M:%S"
_MARK = "IMAGE-{}-OF-THE-EXAMPLE"
PROBES = ("/health", "/live", "/ready", "/metrics", "/load", "/ping", "/version")


def configure(level: str = "info", quiet_paths: Collection[str] = ()) -> None:
    """Send every logger's lines to stdout in one format.

    Probes and the quiet paths are left out of the access log.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # prompts of examples in an ASCII locale
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(LINE, TIME))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("serving", "lora_jax", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("serving.access").addFilter(LeaveOut((*PROBES, *quiet_paths)))


class LeaveOut(logging.Filter):
    """Leaves requests for some paths out of the access log."""

    def __init__(self, paths: Collection[str] = PROBES):
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        return not (len(args) >= 3 and str(args[2]).partition("?")[0] in self._paths)


def version_line() -> str:
    """Return the versions of this package and of Python."""
    return f"lora-jax {importlib.metadata.version('lora-jax')}, Python {platform.python_version()}."


def adapter_table(entries: Sequence[AdapterEntry]) -> list[str]:
    """Return one line per adapter: name, kind, rank (LoRA), modules, size and hash."""
    if not entries:
        return ["Adapters: none loaded."]
    rows = [("adapter", "kind", "rank", "modules", "MB", "sha256")]
    for entry in entries:
        report = entry.report
        ranks = sorted({r for module in report.modules.values() for r in module.ranks})
        shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}" if ranks else "-"
        size = f"{report.weight_bytes / 1e6:.2f}"
        modules = ",".join(report.modules)
        rows.append((entry.name, report.kind, shown, modules, size, report.digest[:12]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def folder_lines(names: Collection[str]) -> list[str]:
    """Return a line that names the adapters which load on their first use, if there are any."""
    if not names:
        return []
    shown = sorted(names)[:20]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [f"Adapters that load on first use: {', '.join(shown)}{more}. model=NAME picks one."]


def route_lines(app: FastAPI) -> list[str]:
    """Return `Route: PATH, Methods: ...` for every documented route, in order of path."""
    paths = app.openapi()["paths"]
    return [
        f"Route: {path}, Methods: {', '.join(m.upper() for m in sorted(methods))}"
        for path, methods in sorted(paths.items())
    ]


def ready_lines(
    url: str,
    model: str,
    needs_key: bool,
    adapters: Sequence[str] = (),
    examples: Examples | None = None,
    chats: bool = False,
    demo: bool = False,
) -> list[str]:
    """Return the lines that say where the server, and with `demo` its page, is and how to try it.

    The prompt is the first example of an adapter that is served, else the base's; with `chats` it
    is a message, with the example's images. On a Unix socket that is an instance behind a router,
    which says how.
    """
    if url.startswith("unix:"):
        return [f"Ready: {url} serves {model}."]
    examples = examples or Examples()
    adapter = next((name for name in examples.adapters if name in adapters), None)
    prompt, images = examples.of(adapter)
    prompt = prompt or "Once upon a time"
    body: dict[str, Any] = {"model": adapter or model, "max_tokens": 48, "temperature": 0}
    if chats:
        content = _image_parts(images, prompt) if images else prompt
        path, body = "chat/completions", body | {"messages": [{"role": "user", "content": content}]}
    else:
        path, body = "completions", body | {"prompt": prompt}
    key = ' -H "Authorization: Bearer $SERVING_API_KEY"' if needs_key else ""
    others = [name for name in (model, *adapters) if name != body["model"]]
    return [
        f"Ready: {url} serves {model}. Try:",
        f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' "
        f"-d {_with_files(shlex.quote(json.dumps(body, ensure_ascii=False)), images)}",
        *(f'Another model answers to its name: "model": {json.dumps(n)}.' for n in others[:1]),
        *([f"The demo page: {url}/"] if demo else []),
    ]


def _image_parts(images: Sequence[Path], prompt: str) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{_MARK.format(n)}" for n in range(len(images))]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    return [*parts, {"type": "text", "text": prompt}]


def _with_files(quoted: str, images: Sequence[Path]) -> str:
    """Return a quoted shell word where each mark of an image is the shell's reading of its file."""
    for number, path in enumerate(images):
        read = f"$(base64 < {shlex.quote(str(path))} | tr -d '\\n')"
        quoted = quoted.replace(_MARK.format(number), f"'\"{read}\"'")
    return quoted


class HasStats(Protocol):
    """An engine as far as the periodic line knows it."""

    def stats(self) -> EngineStats: ...


class PeriodicStats:
    """Logs one line per interval in which the engine had work."""

    def __init__(self, engine: HasStats, every_s: float = 10.0):
        self._engine, self._every_s = engine, every_s
        self._last = EngineStats()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats", daemon=True)

    def __enter__(self) -> "PeriodicStats":
        self._last = self._engine.stats()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        logger = logging.getLogger(__name__)
        while not self._stop.wait(self._every_s):
            line = self.line()
            if line:
                logger.info(line)

    def line(self) -> str | None:
        """Return the line about the time since the last call, None if there was nothing to do."""
        last, now = self._last, self._engine.stats()
        self._last = now
        prompt = now.prompt_tokens - last.prompt_tokens
        generated = now.generation_tokens - last.generation_tokens
        if not (prompt or generated or now.running or now.waiting):
            return None
        return (
            f"Avg prompt throughput: {prompt / self._every_s:.1f} tokens/s, "
            f"Avg generation throughput: {generated / self._every_s:.1f} tokens/s, "
            f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
            f"KV cache usage: {100 * now.kv_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * now.prefix_hit_rate:.1f}%, "
            f"adapters resident {now.adapter_slots_used}/{now.adapter_slots_total}"
        )


def log_all(lines: Iterable[str]) -> None:
    """Log each line for itself."""
    logger = logging.getLogger(__name__)
    for line in lines:
        logger.info(line)
