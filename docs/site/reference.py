"""Reference tables as Markdown, read from the code: flags, routes and metrics.

`python docs/site/reference.py flags` prints one of them.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def flags() -> str:
    """Return one table per group of the command line's flags."""
    from serving.cli.flags import build_parser

    parser, parts = build_parser(), []
    for group in parser._action_groups:
        shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        rows = [_flag(a) for a in shown if a.dest != "help"]
        if rows:
            parts += [f"## {_title(group.title)}", _table(("flag", "value", "meaning"), rows)]
    return "\n\n".join(parts)


def _title(group: str | None) -> str:
    return {"positional arguments": "Model", "options": "General"}.get(
        group or "", (group or "").capitalize()
    )


def _flag(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    value = ""
    if action.choices:
        value = ", ".join(map(str, action.choices))
    elif action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction):
        metavar = action.metavar or action.dest.upper()
        value = f"{metavar} ..." if action.nargs == "+" else str(metavar)
    return names, value, _code_angles(action.help or "")


def _code_angles(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


def routes() -> str:
    """Return a table of the HTTP routes, from the application's OpenAPI description."""
    from serving.http.app import create_app

    paths = create_app(_described_engine()).openapi()["paths"]
    rows = [
        (f"`{method.upper()} {path}`", _sentence(details))
        for path, methods in sorted(paths.items())
        for method, details in sorted(methods.items())
    ]
    return _table(("route", "what it does"), rows)


def _described_engine() -> Any:
    """Return an object that suffices to build the application; it serves nothing."""
    from serving.api.config import EngineConfig

    return SimpleNamespace(
        config=EngineConfig(model="MODEL"), registry=None, model_info=None, metrics=None
    )


def _sentence(details: dict[str, Any]) -> str:
    text = details.get("description") or details.get("summary") or ""
    return _code_angles(text.split("\n\n")[0])


def metrics() -> str:
    """Return a table of the metrics of every process that has some, with every feature on."""
    rows = []
    for registry in _registries():
        for family in registry.collect():
            suffix = "_total" if family.type == "counter" else ""
            collector = _collectors(registry).get(family.name, family)
            labels = {k for s in family.samples for k in s.labels} - {"le"}
            labels = sorted(labels or getattr(collector, "_labelnames", ()))
            shown = ", ".join(f"`{name}`" for name in labels)
            rows.append((f"`{family.name}{suffix}`", family.type, shown, family.documentation))
    return _table(("metric", "type", "labels", "meaning"), sorted(rows))


def _registries() -> Iterable[CollectorRegistry]:
    from serving.cluster.function_metrics import FunctionMetrics
    from serving.http.access.observe import HttpMetrics
    from serving.lora_server.lease_metrics import LeaseMetrics

    yield _engine_registry()
    for metrics in (HttpMetrics(), LeaseMetrics(), FunctionMetrics()):
        yield metrics.registry


def _engine_registry() -> CollectorRegistry:
    """Return the registry of an engine that speculates, merges, has a tower and a rollout."""
    from serving.engine.metrics.draft_metrics import DraftCollector
    from serving.engine.metrics.metrics import EngineMetrics
    from serving.engine.metrics.version_metrics import ShareCollector
    from serving.engine.parts.image_parts import TowerCollector
    from serving.engine.parts.merging import MergeCollector
    from serving.scheduling.speculation import DraftStats

    engine = EngineMetrics("MODEL", 1024, {"block_size": "16"}, 1)
    merged: Any = SimpleNamespace(steps={}, num_switches=0, merged=None)
    stopwatch: Any = SimpleNamespace(count=0, seconds=0.0)
    for collector in (
        DraftCollector(engine.labels, DraftStats),
        MergeCollector(merged),
        TowerCollector(stopwatch),
        ShareCollector(dict),
    ):
        engine.registry.register(collector)
    return engine.registry


def _collectors(registry: Any) -> dict[str, Any]:
    """Return the collectors of a registry and of those within it, by metric."""
    found = dict(registry._names_to_collectors)
    for inner in registry._collector_to_names:
        if isinstance(inner, CollectorRegistry):
            found |= _collectors(inner)
    return found


PAGES = {"flags": flags, "routes": routes, "metrics": metrics}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
