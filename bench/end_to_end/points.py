"""Points of a measurement: what is asked of a server, and what the load generator found.

The generator is `vllm-rs bench serve` (of the vllm wheel), the same for every server: random token
ids as prompts, a fixed number of answers' tokens, greedy, a fixed number of requests at once.
"""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

PROMPT, ANSWER = 512, 128
LONG_PROMPT = 2048
SEEDS_OF_REPEATS = 100_003
ZIPF_NAMES = 1000  # entries of the list that a popularity is written as

KEPT = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    *(f"{at}_{what}_ms" for what in ("ttft", "tpot", "itl") for at in ("mean", "median", "p99")),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """Requests of one kind, so many at once."""

    case: str  # "base", "8 adapters", "64 adapters", "prompts"
    concurrency: int
    requests: int
    prompt: int = PROMPT  # tokens
    answer: int = ANSWER  # tokens
    names: tuple[str, ...] = ()  # adapters, one drawn or taken in turn by a request
    drawn: bool = False  # draw a name; otherwise they take turns


@dataclasses.dataclass(frozen=True)
class Target:
    """A server, and the generator that drives it."""

    url: str
    model: str
    tokenizer: Path
    client: Path

    def measure(self, point: Point, repeat: int, raw: Path) -> dict[str, Any]:
        """Ask a point and return its row; the generator's own JSON stays in `raw`.

        RuntimeError: the generator failed, or the server refused requests.
        """
        done = subprocess.run(
            self.command(point, repeat, raw), capture_output=True, text=True, check=False
        )
        text = done.stdout + done.stderr
        if done.returncode or not raw.is_file():
            raise RuntimeError(f"the load generator ended with {done.returncode}: {text[-1500:]}")
        results = json.loads(raw.read_text())
        if results["completed"] != point.requests:
            told = [line for line in text.splitlines() if "error" in line.lower()][:3]
            raise RuntimeError(
                f"{results['completed']} of {point.requests} requests were answered. The load "
                f"generator said: {' / '.join(told) or 'nothing of errors'}"
            )
        return row_of(point, repeat, results)

    def command(self, point: Point, repeat: int, raw: Path) -> list[str]:
        """Return the generator's command line of a point."""
        asked = {
            "backend": "openai",
            "base-url": self.url,
            "model": self.model,
            "tokenizer": str(self.tokenizer),
            "dataset-name": "random",
            "random-input-len": point.prompt,
            "random-output-len": point.answer,
            "num-prompts": point.requests,
            "max-concurrency": point.concurrency,
            "seed": seed_of(point, repeat),
            "extra-body": '{"temperature": 0}',
            "result-dir": str(raw.parent),
            "result-filename": raw.name,
            "percentile-metrics": "ttft,tpot,itl",
            "metric-percentiles": "50,99",
        }
        command = [str(self.client), "bench", "serve"]
        command += [part for key, value in asked.items() for part in (f"--{key}", str(value))]
        command += ["--prompt-token-ids", "--ignore-eos", "--save-result", "--disable-tqdm"]
        command += ["--no-steady-state"]
        if point.names:
            order = "random" if point.drawn else "round-robin"
            command += ["--lora-modules", *point.names, "--lora-assignment", order]
        return command


def seed_of(point: Point, repeat: int) -> int:
    """Return a seed of its own for each point and repeat: no prompt may meet a cached prefix."""
    letters = sum(ord(letter) for letter in point.case)
    return (letters * 131 + point.concurrency * 7 + point.prompt) + repeat * SEEDS_OF_REPEATS


def row_of(point: Point, repeat: int, results: dict[str, Any]) -> dict[str, Any]:
    """Return what a result file keeps of the generator's JSON; times in ms, rates in tokens/s."""
    row: dict[str, Any] = {
        "case": point.case,
        "concurrency": point.concurrency,
        "repeat": repeat,
        "prompt_tokens": point.prompt,
        "answer_tokens": point.answer,
    }
    row |= {key: results.get(key) for key in KEPT}
    row["input_throughput"] = results["total_input_tokens"] / results["duration"]
    return row


def by_popularity(names: tuple[str, ...], exponent: float) -> tuple[str, ...]:
    """Return a list in which a name stands as often as Zipf's law says, the first most often.

    A name drawn from the list is then drawn by that law; every name stands there at least once.
    """
    weights = [(place + 1) ** -exponent for place in range(len(names))]
    total = sum(weights)
    times = [max(1, round(ZIPF_NAMES * weight / total)) for weight in weights]
    return tuple(name for name, count in zip(names, times, strict=True) for _ in range(count))


def plan(
    concurrencies: list[int], adapters: tuple[str, ...], few: int = 8, exponent: float = 1.2
) -> list[Point]:
    """Return the points of a server: base, `few` adapters in turn, all of them by popularity."""

    def requests(at_once: int) -> int:
        return 4 if at_once == 1 else 3 * at_once

    points = [Point("base", c, requests(c)) for c in concurrencies]
    if len(adapters) >= few:
        points += [
            Point(f"{few} adapters", c, requests(c), names=adapters[:few]) for c in concurrencies
        ]
    if len(adapters) > few:
        drawn = by_popularity(adapters, exponent)
        case = f"{len(adapters)} adapters"
        points += [Point(case, c, requests(c), names=drawn, drawn=True) for c in concurrencies]
    long = Point("prompts", 16, 64, prompt=LONG_PROMPT, answer=1)
    return [*points, long]
