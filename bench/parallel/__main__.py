"""Exchanges between GPUs: `python -m bench.parallel --out DIR` writes JSON and a table."""

import argparse
import dataclasses
import datetime
import json
import os
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast

import jax

from bench.parallel.exchange import KILOBYTES, Exchange, measure
from cuda_backend.all_gather import GatherGroup

HEAD = "| result on each device, KB | ours, us | NCCL, us | NCCL in the CUDA graph, us |"


def table(rows: list[Exchange]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEAD, "| --- " * 4 + "|"]
    for row in rows:
        figures = (row.kilobytes, row.ours_us, row.nccl_us, row.nccl_graph_us)
        lines.append("| " + " | ".join(map(str, figures)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every size over the first `--devices` GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--devices", type=int, default=2, help="number of GPUs (default 2)")
    args = parser.parse_args()
    group = GatherGroup(args.devices)
    rows = [measure(args.devices, size, group.number) for size in KILOBYTES]
    group.check()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    kind = jax.devices()[0].device_kind
    result = {
        "what": "all-gather between GPUs of one process, us per exchange",
        "device": f"{args.devices} x {kind}",
        "date": date,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    name = f"exchange_{kind.lower().replace(' ', '_')}_x{args.devices}_{date}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
