"""Timeline of a GPU, from jax's profiler."""

from pathlib import Path

import jax


def timeline(folder: str) -> list[tuple[str, float, float, str]]:
    """Return (stream, begin, microseconds, kernel) of all that a trace has of devices, in order."""
    results = []
    for file in Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        times = event.start_ns / 1e3, event.duration_ns / 1e3
                        results.append((line.name, *times, event.name))
    return sorted(results, key=lambda event: event[1])


def shown(events: list[tuple[str, float, float, str]], most: int = 1500) -> str:
    """Return the first events as lines: when, how long, after what pause, where, what."""
    lines, ended = [], 0.0
    for stream, begin, took, name in events[:most]:
        pause = begin - ended if ended else 0.0
        lines.append(f"{begin:14.1f} {took:9.1f} {pause:9.1f} {stream[:24]:24} {name[:80]}")
        ended = max(ended, begin + took)
    return "\n".join(lines) + "\n"
