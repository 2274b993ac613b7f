"""A whole server under load, ours or any other that speaks OpenAI's API.

`python -m bench.end_to_end MODEL --out DIR` starts this project's server on the folder MODEL, of a
config.json and a tokenizer.json (weights are drawn), asks 1, 16, 64 and 256 requests at once of 512
tokens with 128 each, without adapters, with 8 in turn and with `--adapters` by Zipf's law over
`--max-loras` slots, then prompts of 2,048 tokens. `--url URL --model NAME` measures a server that
runs already (vLLM, SGLang): give `--names a0 a1 ...` for its adapters and `--label vllm-0.26.0`.
`--client` is the load generator `vllm-rs` of the vllm wheel; `make test` leaves it in .cache. The
generator's own JSON of every point stays in DIR/raw. Two servers compare only on one machine.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench import record
from bench.end_to_end.limits import CARDS, Limits
from bench.end_to_end.plots import plot_end_to_end
from bench.end_to_end.points import Point, Target, plan
from bench.end_to_end.server import Server, write_adapter_configs

HOST_BYTES = 1 << 42
CLIENT = Path(__file__).parents[2] / ".cache" / "vllm-rs"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.end_to_end", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="folder with config.json and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--url", help="URL of a running server (default: start lora-jax)")
    parser.add_argument("--model", default="base", help="name of the base model at that server")
    parser.add_argument("--names", nargs="*", default=[], help="names of that server's adapters")
    parser.add_argument("--label", default="lora-jax", help="name of the server in the results")
    parser.add_argument(
        "--adapters", type=int, default=64, help="adapters of a started server; 0: none"
    )
    parser.add_argument(
        "--max-loras", type=int, default=16, help="adapter slots of a started server"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", nargs="+", help="cases to run: base, '8 adapters', prompts, ...")
    parser.add_argument("--client", type=Path, default=CLIENT)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument(
        "--server-flags", default="", help="further flags of a started server, as one string"
    )
    return parser.parse_args()


def flags_of_ours(args: argparse.Namespace, modules: tuple[str, ...]) -> list[str]:
    """Return the flags that our server is started with."""
    flags = ["--load-format", "dummy", "--max-num-seqs", str(max(args.concurrency))]
    if modules:
        flags += ["--max-loras", str(args.max_loras), "--max-lora-rank", str(args.rank)]
        # All adapters lie on the host, as with vLLM's --max-cpu-loras; dummies share their bytes.
        flags += ["--max-total-adapter-bytes", str(HOST_BYTES)]
        flags += ["--lora-modules", *modules]
    return flags + args.server_flags.split()


def measure(target: Target, points: list[Point], repeats: int, out: Path) -> list[dict[str, Any]]:
    """Return a row for each point and repeat; a point that fails is a row with its error."""
    rows = []
    for repeat in range(repeats):
        for number, point in enumerate(points):
            raw = out / "raw" / f"{number:02d}_{point.concurrency}_{repeat}.json"
            try:
                row = target.measure(point, repeat, raw)
            except RuntimeError as error:
                row = {"case": point.case, "concurrency": point.concurrency, "repeat": repeat}
                row["error"] = str(error)
            print({key: row.get(key) for key in SHOWN}, flush=True)
            rows.append(row)
    return rows


SHOWN = (
    "case",
    "concurrency",
    "repeat",
    "output_throughput",
    "input_throughput",
    "median_itl_ms",
    "mean_ttft_ms",
    "error",
)


def main() -> None:
    """Measure, print, write and draw."""
    args, about = parse_args(), record.about()
    (args.out / "raw").mkdir(parents=True, exist_ok=True)
    if not args.client.is_file():
        raise SystemExit(f"no load generator at {args.client}: `make .cache/vllm-rs` fetches it")
    with tempfile.TemporaryDirectory() as folder:
        modules, server = (), None
        if args.url is None:
            modules = write_adapter_configs(Path(folder), args.adapters, args.rank)
            log = args.out / "server.log"
            server = Server(args.folder, args.port, flags_of_ours(args, modules), log)
            print(f"healthy after {server.start_s:.1f} s", flush=True)
        names = tuple(args.names) or tuple(module.partition("=")[0] for module in modules)
        points = plan(args.concurrency, names)
        points = [point for point in points if not args.case or point.case in args.case]
        url = args.url or (server.url if server else "")
        target = Target(url, args.model, args.folder, args.client)
        try:
            rows = measure(target, points, args.repeats, args.out)
        finally:
            if server:
                server.stop()
    device = record.gpu()
    result: dict[str, Any] = {"server": args.label, "model": args.folder.name}
    result |= about | {"device": device, "start_s": server.start_s if server else None}
    if card := CARDS.get(device):
        limits = Limits(json.loads((args.folder / "config.json").read_text()), card)
        result["limits"] = [
            {"case": p.case, "concurrency": p.concurrency, "tokens_per_s": limits.tokens_per_s(p)}
            for p in points
        ]
    result["rows"] = rows
    words = "end_to_end", args.label, args.folder.name, record.in_file_name(device), result["date"]
    file = args.out / f"{'_'.join(words)}.json"
    record.write(file, result)
    plot_end_to_end(result, file.with_suffix(".png"))
    print(file)


if __name__ == "__main__":
    main()
