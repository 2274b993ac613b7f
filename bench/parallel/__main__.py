"""A model over several devices of one host: `python -m bench.parallel PART --out DIR` writes JSON.

Parts: `exchange` (all-gather, ours beside NCCL's), `bits` (answers against those of one device),
`steps` (decode, prompts), `host` (processor time of the thread that sends steps), `graphs` (CUDA
graphs of a step), `served` (a whole engine), `cluster` (instances behind the router, and one
alone), `remote` (an instance beside a LoRA Server). Parts that run side by side share
`--lock FILE`, so that each measures alone. `--exchange lax` takes `jax.lax.all_gather` in place of
the own kernel, `--attention-output` says whether each device has attention's last map, o, whole.
`--earlier` takes forms that were before (bench.parallel.earlier).
`--shared-rows N` has devices share products of whole weights from N rows on (0: never).
`--long` compares answers to prompts of more than 1,000 tokens in one step. `--tiny` is for a CPU.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import record

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast


from bench.parallel import bits, cluster, graphs, host, remote, served, steps
from bench.parallel.earlier import EARLIER, use_earlier
from bench.parallel.exchange import exchanges
from bench.parallel.quiet import Quiet
from bench.parallel.shapes import SMALL, SPEED, tiny
from lora_jax.models import split as model_split
from lora_jax.nn import gather
from lora_jax.sharding import ATTENTION_OUTPUTS
from serving.engine.parts.devices import make_cpu_devices

PARTS = ("exchange", "bits", "steps", "host", "graphs", "served", "cluster", "remote")
COMPARING = ("bits", "host")  # parts that take several numbers of devices
HOST_SIZES = steps.Sizes(position=20)
TINY_SIZES = steps.Sizes(rows=8, position=20, prompts=2, prompt=12)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits where a part is given more numbers of devices than it takes."""
    parser = argparse.ArgumentParser(prog="python -m bench.parallel", description=__doc__)
    parser.add_argument("part", nargs="?", default="exchange", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=[2],
        help="numbers of devices; several for bits and host",
    )
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=[*SPEED, *SMALL])
    parser.add_argument("--layers", type=int, help="number of first layers to build (default: all)")
    parser.add_argument(
        "--expert-parallel",
        action=argparse.BooleanOptionalAction,
        help="give each device whole experts",
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the LoRA Server")
    parser.add_argument("--position", type=int, default=512, help="position of decoding rows")
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a prefill step; 0: none")
    parser.add_argument("--profile", action="store_true", help="write the kernels of each step")
    parser.add_argument("--exchange", choices=("own", "lax"), default="own")
    parser.add_argument("--attention-output", choices=ATTENTION_OUTPUTS, help="of o, see above")
    parser.add_argument("--shared-rows", type=int, help="fewest rows that devices share; 0: never")
    parser.add_argument("--earlier", choices=EARLIER, nargs="*", default=[], help="forms to use")
    parser.add_argument("--long", action="store_true", help="bits of long prompts")
    parser.add_argument("--lock", type=Path, help="lock file shared by parts that run side by side")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    args = parser.parse_args(argv)
    if len(args.devices) > 1 and args.part not in COMPARING:
        parser.error(
            f"--devices takes one number for {args.part}, got {' '.join(map(str, args.devices))}: "
            "run the command once for each"
        )
    return args


def measure(args: argparse.Namespace, folder: Path, quiet: Quiet) -> dict[str, Any] | list[Any]:
    """Return the rows of the part that was asked for."""
    raw, devices = _shape(args), args.devices[0]
    sizes = steps.Sizes(position=args.position, prompts=args.prompts)
    sizes = TINY_SIZES if args.tiny else sizes
    if args.part == "exchange":
        with quiet.alone():
            return exchanges(devices)
    if args.part == "bits":
        return bits.measure(args.model, args.devices, folder, raw, quiet, long=args.long)
    if args.part == "steps":
        how = {"profiled": args.profile}
        return steps.measure(raw, devices, args.expert_parallel, sizes, quiet, **how)
    if args.part == "host":
        with quiet.alone():
            return host.measure(raw, args.devices, HOST_SIZES)
    if args.part == "graphs":
        return graphs.measure(raw, devices, args.expert_parallel, sizes)
    if args.part == "cluster":
        return cluster.measure(raw, devices, folder, quiet, args.out / "logs", tiny=args.tiny)
    if args.part == "remote":
        return remote.measure(raw, devices, args.ranks, folder, quiet)
    return served.measure(raw, devices, folder, quiet, profiled=args.profile)


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    raw = (SPEED | SMALL)[args.model]
    raw = tiny(raw) if args.tiny else raw
    return raw | ({"num_hidden_layers": args.layers} if args.layers else {})


def main() -> None:
    """Measure, print and write."""
    args = parse()
    make_cpu_devices(max(args.devices))
    if args.exchange == "lax":
        model_split.open_group = lambda devices: None
    if args.attention_output:
        model_split.attention_output = lambda config: args.attention_output
    if args.shared_rows is not None:
        gather.SHARED_ROWS = args.shared_rows or sys.maxsize
    use_earlier(args.earlier)
    quiet = Quiet(args.lock)
    about = record.about()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder), quiet)
    about["device"] = device = record.jax_device()
    over = "_".join(map(str, args.devices))
    parts = [args.part, *([] if args.part == "exchange" else [args.model])]
    experts = {None: [], True: ["ep"], False: ["tp"]}[args.expert_parallel]
    lax = ["lax"] if args.exchange == "lax" else []
    output = [f"o-{args.attention_output}"] if args.attention_output else []
    output += [f"share-{args.shared_rows}"] if args.shared_rows is not None else []
    output += ["earlier", *args.earlier] if args.earlier else []
    output += ["long"] if args.long else []
    words = ["parallel", *parts, *experts, *lax, *output, record.in_file_name(device), f"x{over}"]
    name = "_".join([*words, about["date"]])
    result = about | {"what": args.part, "model": args.model}
    result |= {"layers": _shape(args)["num_hidden_layers"], "alone": quiet.was_alone}
    result |= {"rows": rows}
    record.write(args.out / f"{name}.json", result)
    shown = (
        {k: v for k, v in rows.items() if k not in ("turns_ms", "kernels")}
        if isinstance(rows, dict)
        else rows
    )
    print(args.part, json.dumps(shown))


if __name__ == "__main__":
    main()
