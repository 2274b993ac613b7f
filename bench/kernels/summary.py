"""Table of the kernel results, and a comparison with the best peer of each point."""

import statistics
from collections.abc import Iterable
from typing import Any

HEAD = ("kernel", "limit", "ours", "over limit", "target", "best peer", "peer over ours", "error")
SECTIONS = ("Points", "Grid", "Popularities")
OTHER = ("other forms",)  # of the points: what was timed in turn with them
SHOWN = ("floor_us", "bar_us", "peer_us")


def section(row: dict) -> str:
    """Return the heading that a row of the table stands under."""
    title = row["part"].capitalize()
    return title if title in SECTIONS else SECTIONS[0]


def compared(rows: list[dict]) -> dict[str, float]:
    """Return the peer's time over ours, by name, of the grid's points that have a peer."""
    with_peer = [row for row in rows if row["part"] == "grid" and row.get("peer_us")]
    return {row["name"]: row["peer_us"] / row["us"] for row in with_peer}


def summarise(rows: list[dict]) -> dict | None:
    """Return the number of points, their geometric mean and what is slower; None without any."""
    ratios = compared(rows)
    if not ratios:
        return None
    slower = sorted((name for name in ratios if ratios[name] < 1), key=lambda name: ratios[name])
    return {
        "points": len(ratios),
        "geometric_mean": statistics.geometric_mean(ratios.values()),
        "slower_than_peer": {name: ratios[name] for name in slower},
    }


def say_grid(rows: list[dict]) -> str:
    """Return the summary in words, one line for each point that is slower than its peer."""
    results = summarise(rows)
    if results is None:
        return "No point of the grid with a peer was measured."
    slower = results["slower_than_peer"]
    lines = [
        f"Grid: the best peer takes {results['geometric_mean']:.2f} times our time, in the "
        f"geometric mean of {results['points']} points; {len(slower)} are slower than it:"
    ]
    return "\n".join([*lines, *(f"  {ratio:.2f} {name}" for name, ratio in slower.items())])


def table(result: dict[str, Any]) -> str:
    """Return all rows in Markdown, those of the grid behind the others; times in us."""
    rows = [[row for row in result["rows"] if section(row) == title] for title in SECTIONS]
    copied, dense = result["copy_tb_per_s"], result["dense_tflop_per_s"]
    texts = [
        f"# Kernels on one {result['device']}, {result['date']}",
        "Microseconds, cold L2. Limit: fewest bytes at the copy bandwidth of the run "
        f"({copied:.2f} TB/s), or FLOPs at the rate of XLA's dense matmul ({dense:.0f} TFLOP/s). "
        "Target: set by the project. Peer: the best that was measured. Error: the largest of the "
        "checked rows', relative to float64. `python -m bench.kernels`.",
        *([f"Note: {result['note']}."] if "note" in result else []),
    ]
    for title, some in zip(SECTIONS, rows, strict=True):
        if some:
            head = HEAD + OTHER * any(map(_other_forms, some))
            lines = [_line(head), _line(["---"] * len(head))]
            lines += [_line(_cells(row)[: len(head)]) for row in some]
            texts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join([*texts, say_grid(result["rows"]).replace("\n  ", "\n- ")]) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    peer, us, floor = row.get("peer_us"), row["us"], row["floor_us"]
    name = row["name"] + (f", in a run {row['run']}" if "run" in row else "")
    return [
        name,
        f"{floor:.1f}" if floor else "-",
        f"{us:.1f}",
        f"{us / floor:.2f}" if floor else "-",
        f"{row['bar_us']:.1f}" if row.get("bar_us") else "-",
        f"{peer:.1f}" if peer else "-",
        f"{peer / us:.2f}" if peer else "-",
        f"{row['error']:.1e}",
        _other_forms(row),
    ]


def _other_forms(row: dict[str, Any]) -> str:
    """Return other timed forms, such as XLA's dense map or rerouting by plain operators."""
    others = {name: us for name, us in row.items() if name.endswith("_us") and name not in SHOWN}
    forms = (f"{name[:-3].replace('_', ' ')} {us:.1f}" for name, us in others.items())
    return ", ".join(forms)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
