"""How the grid's points compare with the best peer that was measured at each."""

import statistics


def compared(rows: list[dict]) -> dict[str, float]:
    """Return the peer's time over ours, by name, of the grid's points that have a peer."""
    return {r["name"]: r["peer_us"] / r["us"] for r in rows if r.get("grid") and r.get("peer_us")}


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
    found = summarise(rows)
    if found is None:
        return "No point of the grid with a peer was measured."
    slower = found["slower_than_peer"]
    lines = [
        f"Grid: the best peer takes {found['geometric_mean']:.2f} times our time, in the geometric "
        f"mean of {found['points']} points; {len(slower)} are slower than it:"
    ]
    return "\n".join([*lines, *(f"  {ratio:.2f} {name}" for name, ratio in slower.items())])
