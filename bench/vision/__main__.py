"""Vision on a device and the two applications of V-LoRA; each part writes a JSON file to --out.

    python -m bench.vision --applications --out DIR
    python -m bench.vision --accuracy --task-heads --data DATA --out DIR
    python -m bench.vision --switch --heads --tower --frames --out DIR

The first three run on the shipped model. The other parts take Qwen3-VL's real shapes with random
weights and need a GPU.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import record
from bench.vision import accuracy, applications, device, plots, shapes, task_heads

PARTS = {
    "applications": "visual retrieval and video analytics under four policies, on tiny-vl",
    "accuracy": "held-out accuracy of tiny-vl's adapters and heads; needs --data",
    "task-heads": "each head of tiny-vl against its adapter's LM head; needs --data",
    "switch": "a switch of all attention maps of an 8B shape, to another adapter",
    "heads": "a task head against the LM head, Qwen3-VL-8B's shape",
    "tower": "the tower on one image of 1080 x 1920, beside its products at full speed",
    "frames": "requests with such images, Qwen3-VL-30B-A3B's shape",
}


def run_heads(root: Path) -> dict[str, Any]:
    """Measure answers by a task head."""
    model = shapes.write_shape(root / "qwen3-vl-8b", "qwen3-vl-8b")
    return device.heads(model, shapes.write_headed(root / "head", model, rank=16, labels=10))


def run_tower(root: Path) -> dict[str, Any]:
    """Measure the image tower."""
    return device.tower(shapes.write_shape(root / "qwen3-vl-30b-a3b", "qwen3-vl-30b-a3b"))


def run_frames(root: Path) -> dict[str, Any]:
    """Measure frames of a video."""
    return device.frames(shapes.write_shape(root / "qwen3-vl-30b-a3b", "qwen3-vl-30b-a3b"))


def run_with_data(part: str, data: Path | None, count: int) -> dict[str, Any]:
    """Measure a part that needs a folder of pictures. Raises SystemExit without one."""
    if data is None:
        raise SystemExit(f"--{part} needs --data, the folder that pictures.collect wrote")
    if part == "accuracy":
        return accuracy.run(shapes.TINY, data, count)
    return task_heads.run(shapes.TINY, data)


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
        "--data", type=Path, help="folder that pictures.collect wrote, for parts that need it"
    )
    parser.add_argument("--heldout", type=int, default=200, help="images of each task (accuracy)")
    parser.add_argument("--out", type=Path, help="folder of the JSON files")
    args = parser.parse_args()
    chosen = [part for part in PARTS if getattr(args, part.replace("-", "_"))]
    if not chosen:
        parser.error(f"choose a part: {', '.join('--' + part for part in PARTS)}")
    kind = record.jax_device()
    for part in chosen:
        told = record.about(kind)
        with tempfile.TemporaryDirectory() as folder:
            if part in RUNS:
                found = RUNS[part](Path(folder))
            else:
                found = run_with_data(part, args.data, args.heldout)
        print(json.dumps(told | found), flush=True)
        if args.out is not None:
            words = "vision", part.replace("-", "_"), record.in_file_name(kind), told["date"]
            name = "_".join(words) + ".json"
            record.write(args.out / name, told | found)
            if plot := plots.PLOTS.get(part):
                plot(told | found, (args.out / name).with_suffix(".png"))


if __name__ == "__main__":
    main()
