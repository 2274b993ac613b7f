"""Policies against the optimum, a simulated cluster of functions, and functions on this machine.

`python -m bench.functions --policies --out DIR`: loss and time of pre-loading and offloading.
`python -m bench.functions --simulate --traces DIR --out DIR`: eight functions over two backbones
for four hours of the Azure Functions trace; every baseline is a model of its idea.
`python -m bench.functions --isolation MODEL --adapter DIR --out DIR`: the price of each isolation
level, for --tenants adapters at once.
`python -m bench.functions --isolation llama-2-7b --layers 8 --out DIR`: levels "none" and "server"
on two GPUs, with random weights of that shape.
`python -m bench.functions --pages GB --out DIR`: pages of so many GB that processes attach to.
`python -m bench.functions --device llama-2-7b --out DIR`: starts, bytes and turns of functions on
a GPU, with random weights of that shape; with `--parts batches slicing` the batches and tokens that
one backbone leaves room for, and first tokens with turns and without.
`python -m bench.functions --measure MODEL --adapter DIR --out DIR`: starts, and turns of 2 and 4.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from bench import record
from bench.functions import (
    device_functions,
    device_isolation,
    device_pages,
    isolation,
    measured,
    policies,
)
from bench.functions.large_model import SHAPES
from bench.functions.run import simulate
from bench.functions.sweeps import papers_load, sweeps
from bench.functions.systems import ABLATIONS, SYSTEMS
from bench.functions.times import Times, read_times
from bench.functions.traces import CLASSES, CONVERSATIONS, MINUTES, WINDOWS, read_classes
from serving.api.functions_config import ISOLATIONS

_LIMIT_S, _SHAPE_LIMIT_S = 20.0, 180.0


def tables(
    traces: Path, times: Times, only_papers: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every class of arrivals, of the switches and sweeps under "normal"; or
    those at the paper's load alone, which take a minute."""
    if only_papers:
        return papers_load(traces, times)
    classes = read_classes(traces)
    rows = {name: [simulate(s, times, classes[name]) for s in SYSTEMS] for name in CLASSES}
    rows["switches"] = [simulate(s, times, classes["normal"]) for s in ABLATIONS]
    return rows | sweeps(traces, times)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.functions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--policies", action="store_true", help="compare greedy plans with the best ones"
    )
    parser.add_argument("--simulate", action="store_true", help="simulate functions and baselines")
    parser.add_argument(
        "--measure", type=Path, metavar="MODEL", help="measure functions over this model"
    )
    parser.add_argument(
        "--isolation",
        type=Path,
        metavar="MODEL",
        help="compare isolation levels over this model; of a shape of --device: none and server",
    )
    parser.add_argument("--layers", type=int, default=0, help="layers of a shape; 0: all")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompts over a shape")
    parser.add_argument("--answer-tokens", type=int, default=128, help="answers over a shape")
    parser.add_argument("--adapter", type=Path, help="adapter for --measure and --isolation")
    parser.add_argument(
        "--pages", type=float, nargs="+", metavar="GB", help="sizes of backbones to attach, in GB"
    )
    parser.add_argument(
        "--device", choices=SHAPES, help="run functions of a model of this shape on a GPU"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=(*device_functions.PARTS, *device_functions.MORE_PARTS),
        default=device_functions.PARTS,
        help=f"parts of --device ({' '.join(device_functions.PARTS)})",
    )
    parser.add_argument("--importers", type=int, default=4, help="attaching processes of --pages")
    parser.add_argument("--tenants", type=int, default=8, help="tenants of --isolation")
    parser.add_argument("--levels", nargs="+", default=ISOLATIONS, help="levels to compare")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --isolation")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[2, 4], help="numbers of functions of --measure"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="length of a round of --measure, in seconds"
    )
    parser.add_argument(
        "--slice-s",
        type=float,
        default=60.0,
        help="length of the trace of --measure; 0: none",
    )
    parser.add_argument(
        "--traces", type=Path, help=f"folder with {WINDOWS}, {MINUTES} and {CONVERSATIONS}"
    )
    parser.add_argument(
        "--papers-load", action="store_true", help="of --simulate, only the rows at that load"
    )
    parser.add_argument("--times", type=Path, help="JSON with fields of bench.functions.times")
    parser.add_argument("--instances", type=int, default=20, help="random instances of --policies")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=_LIMIT_S,
        help=f"time limit of one best plan, in seconds; of a shape: of all ({_SHAPE_LIMIT_S:g})",
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options that were given; exits with a message where they do not fit together."""
    given = parser.parse_args()
    named = given.measure, given.isolation, given.pages, given.device
    if given.policies + given.simulate + sum(one is not None for one in named) != 1:
        parser.error(
            "give one of --policies, --simulate, --measure, --isolation, --pages and --device."
        )
    is_shape = str(given.isolation) in SHAPES
    if (given.measure or given.isolation) and given.adapter is None and not is_shape:
        parser.error("--measure and --isolation need --adapter.")
    if given.simulate:
        folder = given.traces or Path()
        missing = [n for n in (WINDOWS, MINUTES, CONVERSATIONS) if not (folder / n).is_file()]
        if given.traces is None or missing:
            parser.error(
                f"--simulate reads {', '.join(missing)} in the folder --traces; bench/README.md "
                "says what these files are."
            )
    return given


def measured_of(given: argparse.Namespace) -> tuple[str, Any]:
    """Return the kind of the results, which is their key, and the results."""
    if given.policies:
        return "policies", policies.measure(given.instances, given.limit_s)
    if given.measure:
        sizes = given.counts, given.seconds, given.slice_s
        return "measured", measured.measure(given.measure, given.adapter, *sizes)
    if given.isolation and str(given.isolation) in SHAPES:
        limit_s = given.limit_s if given.limit_s != _LIMIT_S else _SHAPE_LIMIT_S
        lengths = given.prompt_tokens, given.answer_tokens
        sizes = given.layers, given.tenants, *lengths, given.rounds, given.seconds, limit_s
        return "device_isolation", device_isolation.measure(
            str(given.isolation), device_isolation.Load(*sizes)
        )
    if given.isolation:
        sizes = given.tenants, given.seconds, given.rounds, given.levels
        return "isolation", isolation.measure(given.isolation, given.adapter, *sizes)
    if given.pages:
        return "pages", device_pages.measure(given.pages, [given.importers])
    if given.device:
        sizes = given.counts, given.seconds, given.parts
        return "device", device_functions.measure(given.device, *sizes)
    return "simulated", tables(given.traces, read_times(given.times), given.papers_load)


def main() -> None:
    """Run what was asked for, write a JSON file and print its rows."""
    given = checked(options())
    start = time.monotonic()
    of_gpu = given.pages or given.device or str(given.isolation) in SHAPES
    about = record.about(record.gpu() if of_gpu else None)
    kind, result = measured_of(given)
    if kind == "device":  # the key of the results
        about["gpu"] = about["device"]
    record.write(given.out / f"functions_{kind}.json", about | {kind: result})
    print(json.dumps(result, indent=1))
    print(f"{time.monotonic() - start:.1f} s", flush=True)
    if "error" in result:
        os._exit(1)  # threads of a part that took too long do not end


if __name__ == "__main__":
    main()
