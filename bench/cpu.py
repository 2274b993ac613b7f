"""Decoding on a CPU beside llama.cpp and PEFT: output tokens a second.

`python -m bench.cpu --out DIR` writes a Llama-shaped random model of 125 million parameters
(bench.random_model) in several formats, and lets this engine and, where `xllamacpp` and `gguf` are
installed, llama.cpp answer 1 and 8 requests of 128 tokens with 64 each, greedy, both called in
processes of their own without HTTP. A case takes turns with its peer; figures are medians of the
turns, prompts included. `bench.serve` has the comparison with PEFT. `--cores 1` binds both to one
core and counts tokens a second of processor time: on a busy machine llama.cpp's threads wait for
each other on cores that others have, and the time by the clock says nothing.
For a CPU without AVX-512: `XLA_FLAGS=--xla_cpu_max_isa=AVX2 LORA_JAX_MARCH=x86-64-v3`.
`--profile` shows with `perf`, if it is installed, where the engine's time goes.
"""

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.llama_cpp import LlamaCpp, write_gguf
from bench.random_model import LlamaShape, write_adapter, write_llama

PROMPT, ANSWER, ADAPTERS, RANK = 128, 64, 8, 16
REQUESTS = (1, 8)
# Ours -> the format of llama.cpp beside it.
PAIRS = {"float32": "float32", "bfloat16": "bfloat16", "int4": "q4_0", "fp8": "q8_0"}
PAIRS |= {"int4-head": "q4_0-head", "fp8-head": "q8_0"}
# What lora_jax.quantize writes, and whether its head is quantised too: llama.cpp's head of q4_0 is
# in 8 bits, those of q8_0 and q4_0-head are like the other maps.
ALIKE = {"int4": ("int4", False), "fp8": ("fp8", False)}
ALIKE |= {"int4-head": ("int4", True), "fp8-head": ("fp8", True)}

Generate = Callable[[list[list[int]], list[str | None]], None]


def start_ours(root: Path, kind: str) -> Generate:
    """Return a function that answers prompts with this engine."""
    from serving import Engine, Sampling

    adapters = {f"adapter-{i}": str(root / f"adapter-{i}") for i in range(ADAPTERS)}
    engine = Engine(
        str(root / ("model" if kind not in ALIKE else kind)),
        adapters=adapters,
        dtype="float32" if kind == "float32" else "bfloat16",
        max_loras=ADAPTERS,
        max_lora_rank=RANK,
        max_model_len=PROMPT + ANSWER,
        max_num_seqs=max(REQUESTS),
        enable_prefix_caching=False,
        structured_outputs=False,
    )
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]], names: list[str | None]) -> None:
        engine.generate(prompts, adapter=names, sampling=sampling)

    return generate


def start_llama_cpp(root: Path, kind: str) -> Generate:
    """Return a function that answers prompts with llama.cpp."""
    peer = LlamaCpp(root / f"{kind}.gguf", max(REQUESTS), PROMPT + ANSWER + 8)
    return lambda prompts, names: peer.generate(prompts, ANSWER)


class Peer:
    """An engine in a child process, so that idle threads of one take no time from another."""

    def __init__(
        self, start: Callable[[Path, str], Generate], root: Path, kind: str, cores: int = 0
    ):
        """`cores`: bind it to so many; 0 for all."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, start, root, kind, cores))
        self.process.start()
        theirs.close()
        self._pipe.recv()

    def seconds(self, prompts: list[list[int]], names: list[str | None]) -> float:
        """Return how long the prompts took, of processor time if it is bound to cores."""
        self._pipe.send((prompts, names))
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self.process.join()


def _serve(
    pipe: Connection,
    start: Callable[[Path, str], Generate],
    root: Path,
    kind: str,
    cores: int,
) -> None:
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    now = time.process_time if cores else time.perf_counter
    generate = start(root, kind)
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        begun = now()
        generate(*job)
        pipe.send(now() - begun)
    os._exit(0)  # llama.cpp's threads do not end by themselves


def rates(root: Path, kind: str, turns: int, cores: int, beside: bool) -> list[dict[str, Any]]:
    """Return a row for each number of requests: medians of output tokens a second."""
    peers = {"ours": Peer(start_ours, root, kind, cores)}
    if beside:
        peers["llama.cpp"] = Peer(start_llama_cpp, root, PAIRS[kind], cores)
    rng, rows = np.random.default_rng(7), []
    for requests in REQUESTS:
        none: list[str | None] = [None] * requests
        cases = [(name, peer, none) for name, peer in peers.items()]
        if requests == ADAPTERS:
            named: list[str | None] = [f"adapter-{i}" for i in range(ADAPTERS)]
            cases.append((f"ours, {ADAPTERS} adapters", peers["ours"], named))
        took: dict[str, list[float]] = {}
        for turn in range(turns + 1):
            prompts = rng.integers(300, LlamaShape().vocab_size, (requests, PROMPT)).tolist()
            for name, peer, adapters in cases:
                seconds = peer.seconds(prompts, adapters)
                if turn:  # the first one warms up
                    took.setdefault(name, []).append(seconds)
        results = {name: requests * ANSWER / statistics.median(s) for name, s in took.items()}
        row: dict[str, Any] = {"base": kind, "requests": requests}
        row["tokens_per_s"] = {name: round(rate, 1) for name, rate in results.items()}
        if beside:
            row["over_llama_cpp"] = round(results["ours"] / results["llama.cpp"], 2)
        print(row, flush=True)
        rows.append({**row, "seconds": took})
    for peer in peers.values():
        peer.close()
    return rows


def profile(root: Path, kind: str, requests: int) -> str:
    """Return the symbols that take most of the time of some answers, by `perf`."""
    peer = Peer(start_ours, root, kind)
    prompts = [[300 + r] * PROMPT for r in range(requests)]
    names: list[str | None] = [None] * requests
    peer.seconds(prompts, names)
    data = root / "perf.data"
    asked = ["perf", "record", "-q", "-o", str(data), "-F", "499", "-p", str(peer.process.pid)]
    recorder = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(3):
        peer.seconds(prompts, names)
    recorder.terminate()
    recorder.wait()
    peer.close()
    report = ["perf", "report", "-i", str(data), "--sort", "dso,symbol", "--stdio", "-g", "none"]
    shown = subprocess.run(report, capture_output=True, text=True, check=False).stdout
    lines = [line for line in shown.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join(line[:110] for line in lines[:25])


def write_files(root: Path, kinds: list[str], beside: bool) -> None:
    """Write the model, its adapters and what the formats need."""
    shape = LlamaShape()
    write_llama(root / "model", shape)
    for i in range(ADAPTERS):
        write_adapter(root / f"adapter-{i}", shape, RANK, seed=i + 1)
    for kind in kinds:
        if kind in ALIKE:
            from lora_jax.quantize import quantize

            form, head = ALIKE[kind]
            quantize(root / "model", form, root / kind, quant_lm_head=head)
        if beside:
            write_gguf(root / "model", shape, PAIRS[kind], root / f"{PAIRS[kind]}.gguf")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--base", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cores", type=int, default=0, choices=(0, 1))
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    beside = all(importlib.util.find_spec(name) for name in ("xllamacpp", "gguf"))
    march = os.environ.get("LORA_JAX_MARCH", "native")
    about = record.about()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_files(root, args.base, beside)
        sizes = args.turns, args.cores, beside
        rows = [row for kind in args.base for row in rates(root, kind, *sizes)]
        for kind in args.base if args.profile and shutil.which("perf") else ():
            for requests in REQUESTS:
                print(f"{kind}, {requests} at once:\n{profile(root, kind, requests)}")
    result = {
        **about,
        "march": march,
        "bound_to_cores": args.cores,
        "prompt_tokens": PROMPT,
        "output_tokens": ANSWER,
        "rows": rows,
    }
    bound = f"_{args.cores}_core" if args.cores else ""
    record.write(args.out / f"cpu_{march}{bound}.json", result)


if __name__ == "__main__":
    main()
