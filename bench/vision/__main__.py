"""Vision on a device and the two applications of V-LoRA; each part writes a JSON file to --out.

    python -m bench.vision --applications --out DIR
    python -m bench.vision --accuracy --data DATA --out DIR
    python -m bench.vision --switch --heads --tower --frames --out DIR

The first two run on the shipped model. The other parts take Qwen3-VL's real shapes with random
weights and need a GPU.
"""

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bench.vision import accuracy, applications, device, plots, shapes

PARTS = {
    "applications": "visual retrieval and video analytics under four policies, on tiny-vl",
    "accuracy": "held-out accuracy of tiny-vl's adapters and heads; needs --data",
    "switch": "a switch of all attention maps of an 8B shape, to another adapter",
    "heads": "a task head against the LM head, Qwen3-VL-8B's shape",
    "tower": "the tower on one image of 1080 x 1920, beside its products at full speed",
    "frames": "requests with such images, Qwen3-VL-30B-A3B's shape",
}


def run_heads(root: Path) -> dict[str, Any]:
    model = shapes.write_shape(root / "qwen3-vl-8b", "qwen3-vl-8b")
    return device.heads(model, shapes.write_headed(root / "head", model, rank=16, labels=10))


def run_tower(root: Path) -> dict[str, Any]:
    return device.tower(shapes.write_shape(root / "qwen3-vl-30b-a3b", "qwen3-vl-30b-a3b"))


def run_frames(root: Path) -> dict[str, Any]:
    return device.frames(shapes.write_shape(root / "qwen3-vl-30b-a3b", "qwen3-vl-30b-a3b"))


def run_accuracy(data: Path | None, count: int) -> dict[str, Any]:
    if data is None:
        raise SystemExit("--accuracy needs --data, the folder that pictures.collect wrote")
    return accuracy.run(shapes.TINY, data, count)


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "applications": applications.run,
    "switch": lambda root: device.switch(),
    "heads": run_heads,
    "tower": run_tower,
    "frames": run_frames,
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.vision", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for part, text in PARTS.items():
        parser.add_argument(f"--{part}", action="store_true", help=text)
    parser.add_argument(
        "--data", type=Path, help="folder that pictures.collect wrote, for --accuracy"
    )
    parser.add_argument("--heldout", type=int, default=200, help="images of each task")
    parser.add_argument("--out", type=Path, help="folder of the JSON files")
    args = parser.parse_args()
    chosen = [part for part in PARTS if getattr(args, part)]
    if not chosen:
        parser.error(f"choose a part: {', '.join('--' + part for part in PARTS)}")
    kind = jax.devices()[0].device_kind
    for part in chosen:
        with tempfile.TemporaryDirectory() as folder:
            if part == "accuracy":
                found = run_accuracy(args.data, args.heldout)
            else:
                found = RUNS[part](Path(folder))
        date = datetime.date.today().isoformat()
        told = {"command": f"python -m bench.vision --{part}", "date": date, "device": kind}
        print(json.dumps(told | found), flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            name = f"vision_{part}_{kind.replace(' ', '_').lower()}_{date}.json"
            (args.out / name).write_text(json.dumps(told | found, indent=1) + "\n")
            if plot := plots.PLOTS.get(part):
                plot(told | found, (args.out / name).with_suffix(".png"))


if __name__ == "__main__":
    main()
