"""Arrivals of functions from windows of the Azure Functions trace 2019, by class of burstiness."""

import csv
import gzip
import random
from pathlib import Path

WINDOWS = "azure_functions_2019_windows.csv"
MINUTES = "azure_functions_2019_5fn_per_minute.csv.gz"
CONVERSATIONS = "azure_llm_2023_conv.csv.gz"
WINDOW_MINUTES = 240
CLASSES = ("predictable", "normal", "bursty")


def read_classes(folder: Path) -> dict[str, list[list[float]]]:
    """Return, by class, the arrival times in seconds of its eight windows, one per function.

    The eight windows are of five real functions. Calls of a minute are spread evenly over it, each
    1 to 3 s later at random.
    """
    with gzip.open(folder / MINUTES, "rt") as lines:
        minutes = list(csv.DictReader(lines))
    with open(folder / WINDOWS) as lines:
        chosen = [row for row in csv.DictReader(lines) if row["chosen_class"]]
    rng = random.Random(0)
    found: dict[str, list[list[float]]] = {name: [] for name in CLASSES}
    for row in chosen:
        start = int(row["start_minute"])
        calls = [int(m[row["function"]]) for m in minutes[start : start + WINDOW_MINUTES]]
        found[row["chosen_class"]].append(spread(calls, rng))
    return found


def spread(calls_per_minute: list[int], rng: random.Random) -> list[float]:
    """Return the times in seconds of so many calls in each minute, rising."""
    return sorted(
        60.0 * minute + 60.0 * call / calls + rng.uniform(1, 3)
        for minute, calls in enumerate(calls_per_minute)
        for call in range(calls)
    )


def thinned(arrivals: list[float], share: float, rng: random.Random) -> list[float]:
    """Return each call with this probability: a lower rate of the same pattern."""
    return [moment for moment in arrivals if rng.random() < share]
