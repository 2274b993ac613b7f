"""Tables of the results of `python -m bench.esft_speed`."""

import re
from collections import defaultdict
from typing import Any

_NAME = re.compile(r"(?P<batch>.+), (?P<adapters>\d+) adapters, (?P<kind>same|own) experts")
_PART = re.compile(r"(rerouting|virtual).*")
_HEADS = (
    ("step", "adapters", "base", "same experts, by the clock", "by kernels", "own", "its bytes"),
    ("step", "adapters", "beside", "by the clock", "by kernels"),
)


def tables(rows: list[dict[str, Any]]) -> str:
    """Return two tables in Markdown: steps over the base's, and their parts; times in ms.

    By the clock is the median over pairs, and of them the middle half.
    """
    same, own = rows_by_batch(rows, "same"), rows_by_batch(rows, "own")
    steps = [
        (batch, str(adapters), f"{row['base_us'] / 1e3:.2f} ms", *_over(row), *_own(row, also))
        for batch, points in same.items()
        for (adapters, row), (_, also) in zip(points, own.get(batch, []), strict=False)
    ]
    parts = [
        (row["name"], str(row["adapters"]), f"{row['base_us'] / 1e3:.2f} ms", *_over(row))
        for row in rows
        if _PART.fullmatch(row["name"])
    ]
    return "\n\n".join(
        _table(head, body) for head, body in zip(_HEADS, (steps, parts), strict=True)
    )


def rows_by_batch(rows: list[dict], kind: str) -> dict[str, list[tuple[int, dict]]]:
    """Return (adapters, row) of every batch, in order."""
    results = defaultdict(list)
    for row in rows:
        named = _NAME.fullmatch(row["name"])
        if named and named["kind"] == kind:
            results[named["batch"]].append((int(named["adapters"]), row))
    return {batch: sorted(points, key=lambda point: point[0]) for batch, points in results.items()}


def _over(row: dict[str, Any]) -> tuple[str, str]:
    more, over = row["more"], 100 * (row["us"] / row["base_us"] - 1)
    clock = f"{more.get('over %', over):+.2f}%"
    if "low %" in more:
        clock += f" ({more['low %']:+.2f} to {more['high %']:+.2f})"
    return clock, f"{more['kernels over %']:+.2f}%" if "kernels over %" in more else "-"


def _own(same: dict[str, Any], own: dict[str, Any]) -> tuple[str, str]:
    floors = 100 * (own["floor_us"] / same["base_floor_us"] - 1)
    return f"{100 * (own['us'] / own['base_us'] - 1):+.1f}%", f"{floors:+.1f}%"


def _table(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
