"""CUDA graphs of a split model's decode step on each device, and launches beside them.

`python -m bench.parallel graphs --out DIR` compiles the step for the devices at hand and reads
XLA's list of thunks; nothing runs. Every device runs the same list.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from jax.stages import Lowered

from bench import decode_step
from bench.parallel.steps import Sizes
from bench.thunks import read_thunks
from serving.steps.step_programs import Program

LAYERS = 3


def measure(
    raw: dict[str, Any], devices: int, expert_parallel: bool | None, sizes: Sizes
) -> dict[str, Any]:
    """Return the outermost thunks of a decode step by kind, without and with LoRA."""
    raw = raw | {"num_hidden_layers": LAYERS}
    split = decode_step.split_for(raw, devices, expert_parallel)
    runner = decode_step.make_runner(raw, sizes.rows, sizes.position, split)
    rows = {}
    for name, lora in (("base", False), ("adapters", True)):
        (lowered,) = runner.lowered([Program(sizes.rows, lora)])
        assert isinstance(lowered, Lowered), "this runner keeps no programs"
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, "xla_enable_dumping": True}
            lowered.compile(compiler_options=options)
            outer, inside = read_thunks(Path(folder))
        rows[name] = {"thunks": dict(Counter(outer)), "in_graphs": inside}
    return {
        "devices": devices,
        "experts": None if split is None else split.experts,
        "layers": LAYERS,
        "rows": rows,
    }
