"""Cost of ESFT adapters in a step: TPOT and TTFT over the base (ExpertWeave, 5.2-5.3).

`python -m bench.esft_speed --out DIR` times the compiled step itself by the clock, from the end of
one to the end of the next, and sums up its kernels, on DeepSeek-V2-Lite with random weights
(`--model tiny` on a CPU). "same experts" sends rows of adapters through rerouting to the base's own
experts: what the mechanism costs. "own experts" reads what the adapters replace: more distinct
experts, more bytes, beside their floor.
"""

import argparse
import dataclasses
import functools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from bench import esft_loading, record
from bench.esft_model import SHAPES, MultiEsftModel, Shape
from bench.esft_steps import (
    PROFILES,
    SAMPLES_TAKEN,
    Batch,
    Programs,
    Row,
    Step,
    Took,
    decode_batch,
    in_turn,
    prefill_batch,
)
from bench.esft_table import tables
from bench.kernels.timing import copy_bandwidth
from bench.step_profile import profile_step, show_profile
from serving.steps.step import SLOT

ADAPTERS = (1, 5, 10, 20)
DECODE = (1, 8, 64)  # rows
PREFILL = (1024, 4096)  # tokens
CONTEXT = 1024  # tokens before a decoded one
PADDED_ADAPTERS = 5
SAMPLES = (SAMPLES_TAKEN, PROFILES)


class Measurement:
    """The parts, each of which yields its rows until its time is over."""

    def __init__(
        self, multi_esft: MultiEsftModel, programs: Programs, bandwidth: float, sizes: dict
    ):
        self.multi_esft, self.programs, self.bandwidth = multi_esft, programs, bandwidth
        self.decode_rows, self.prefill_tokens = sizes["decode"], sizes["prefill"]
        self.context, self.samples = sizes["context"], sizes["samples"]
        self.adapters = [n for n in ADAPTERS if n <= len(multi_esft.shape.counts)]

    def decode(self) -> Iterator[Row]:
        """TPOT by rows in the batch and adapters among them."""
        for rows in self.decode_rows:
            yield from self._against_base(
                f"decode, {rows} rows", rows, lambda n, rows=rows: self._decode(rows, n), rows
            )

    def prefill(self) -> Iterator[Row]:
        """TTFT of prompts of so many tokens together, each with an adapter of its own."""
        for tokens in self.prefill_tokens:
            yield from self._against_base(
                f"prefill, {tokens} tokens",
                tokens,
                lambda n, tokens=tokens: prefill_batch(tokens, n, self.programs.sizes),
                tokens // 16,
            )

    def rerouting(self) -> Iterator[Row]:
        """Fused rerouting against plain operators, beside the base."""
        adapters = max(n for n in self.adapters if n <= 10)
        for bucket, batch in self._batches({max(self.decode_rows)}, adapters):
            runner, identity = self.programs.runner, self.multi_esft.identity
            kinds = {kind: runner(kind, bucket, identity, batch) for kind in ("fused", "plain")}
            took = in_turn({"base": self._base(bucket, batch), **kinds}, *self.samples)
            for kind in kinds:
                yield _row(f"rerouting {kind}, {batch.name}", took[kind], took["base"], adapters)

    def padding(self) -> Iterator[Row]:
        """Virtual tensors against dense ones of as many experts, both rerouted to the base's."""
        shape = self.multi_esft.shape
        adapters, groups = padded(shape)
        for other in range(adapters, len(shape.counts)):
            self.multi_esft.unload(str(other))  # the dense ones take their place
        leaves = {"virtual": self.multi_esft.view(groups), "padded": self.multi_esft.padded(groups)}
        ends = {min(self.decode_rows), max(self.decode_rows)}
        for bucket, batch in self._batches(ends, adapters):
            step = functools.partial(
                self.programs.runner, "fused", bucket, self.multi_esft.identity, batch
            )
            took = in_turn({name: step(given) for name, given in leaves.items()}, *self.samples)
            name = f"virtual against padded, {batch.name}"
            yield _row(name, took["virtual"], took["padded"], adapters)

    def loading(self) -> Iterator[Row]:
        """An adapter from host memory and from disk to its first use, and out again."""
        yield from esft_loading.rows(self.multi_esft, self._first_use)

    def profile(self) -> Iterator[Row]:
        """Kernels of a decode step; printed, no rows."""
        for rows in self.decode_rows:
            batch, bucket = self._decode(rows, max(self.adapters)), self._bucket(rows)
            steps = {
                "base": self.programs.runner("base", bucket, None, batch.without_adapters()),
                "same experts": self.programs.runner(
                    "fused", bucket, self.multi_esft.identity, batch
                ),
                "own experts": self.programs.runner("fused", bucket, self.multi_esft.tables, batch),
            }
            for name, step in steps.items():
                print(show_profile(f"{rows} rows, {name}", profile_step(step)), flush=True)
        yield from ()

    def _against_base(
        self, name: str, bucket: int, batch_of: Callable[[int], Batch], most: int
    ) -> Iterator[Row]:
        """Time base, same experts and own experts for every number of adapters that fits."""
        bucket = self._bucket(bucket)
        for adapters in (n for n in self.adapters if n <= most):
            batch = batch_of(adapters)
            runner = functools.partial(self.programs.runner, "fused", bucket, batch=batch)
            took = in_turn(
                {
                    "base": self._base(bucket, batch),
                    "same": runner(tables=self.multi_esft.identity),
                    "own": runner(tables=self.multi_esft.tables),
                },
                *self.samples,
            )
            base = took["base"]
            for kind in ("same", "own"):
                yield dataclasses.replace(
                    _row(
                        f"{name}, {adapters} adapters, {kind} experts", took[kind], base, adapters
                    ),
                    experts=took[kind].experts,
                    base_experts=base.experts,
                    floor_us=self._floor_us(batch, took[kind].experts),
                    base_floor_us=self._floor_us(batch, base.experts),
                )

    def _floor_us(self, batch: Batch, experts: float) -> float:
        """Return what reading weights, touched experts and KV pages once takes."""
        tensors, model = self.multi_esft.tensors, self.multi_esft
        moved = sum(leaf.nbytes for leaf in model.plain)
        moved -= model.config.experts.num_experts * len(tensors.layers) * tensors.expert_bytes
        moved -= model.model.embed.weight[...].nbytes
        moved += experts * tensors.expert_bytes + batch.kv_tokens * self.programs.kv_token_bytes
        return moved / self.bandwidth * 1e6

    def _base(self, bucket: int, batch: Batch) -> Step:
        return self.programs.runner("base", bucket, None, batch.without_adapters())

    def _first_use(self, slot: int) -> Callable[[jax.Array], object]:
        """Return what runs one step for the adapter in a slot, by the tables given then."""
        rows = self.decode_rows[0]
        batch, bucket = self._decode(rows, 1), self._bucket(rows)
        batch.table[SLOT] = slot
        step = self.programs.runner("fused", bucket, self.multi_esft.identity, batch)
        step()  # as an engine's program has run before
        return lambda tables: jax.block_until_ready(step(tables))

    def _decode(self, rows: int, adapters: int) -> Batch:
        return decode_batch(rows, self.context, adapters, self.programs.sizes)

    def _batches(self, decode_rows: set[int], adapters: int) -> list[tuple[int, Batch]]:
        """Return decode steps of so many rows, and the largest prompts."""
        batches = [
            (self._bucket(rows), self._decode(rows, adapters)) for rows in sorted(decode_rows)
        ]
        for tokens in self.prefill_tokens[-1:]:
            batches.append((tokens, prefill_batch(tokens, 1, self.programs.sizes)))
        return batches

    def _bucket(self, tokens: int) -> int:
        return max(8, tokens)


def _row(name: str, took: Took, base: Took, adapters: int) -> Row:
    more = {**took.over(base), "dispatch us": took.dispatch_us}
    return Row(name, took.us, base_us=base.us, adapters=adapters, more=more)


def padded(shape: Shape) -> tuple[int, int]:
    """Return how many adapters are padded, and the experts that a tensor with them has."""
    adapters = min(PADDED_ADAPTERS, len(shape.counts))
    base = shape.config["n_routed_experts"]
    return adapters, base + min(adapters * shape.most, shape.extra)


def begin(programs: Programs, shape: Shape, parts: list[str], sizes: dict) -> None:
    """Let what the parts ask for be compiled, in that order."""
    decode, prefill = [max(8, rows) for rows in sizes["decode"]], sizes["prefill"]
    largest = (max(decode), *prefill[-1:])
    for part in parts:
        for bucket in {"decode": decode, "prefill": prefill, "rerouting": largest}.get(part, ()):
            programs.begin("base", bucket)
            programs.begin("fused", bucket)
        for bucket in largest if part == "rerouting" else ():
            programs.begin("plain", bucket)
        for bucket in {min(decode), *largest} if part == "padding" else ():
            programs.begin("fused", bucket, padded(shape)[1])
        if part == "loading":
            programs.begin("fused", decode[0])


PARTS = ("decode", "rerouting", "prefill", "profile", "loading", "padding")  # the last one unloads


def measure(
    measurement: Measurement, parts: list[str], seconds: float, keep: Callable[[Row], None]
) -> None:
    """Keep all rows; a part that fails or lasts too long is said, and the next one runs."""
    for part in parts:
        end = time.monotonic() + seconds
        try:
            for row in getattr(measurement, part)():
                print(row.show(), flush=True)
                keep(row)
                if time.monotonic() > end:
                    print(f"{part}: the rest is left out, {seconds:.0f} s are over", flush=True)
                    break
        except Exception:
            print(f"{part} failed:\n{traceback.format_exc()}", flush=True)


class Results:
    """A result file that always holds the rows so far, those of earlier runs included.

    A row of the same name is replaced: the parts need not be measured in one run.
    """

    def __init__(self, file: Path, about: dict[str, Any]):
        self._file, self._about = file, about
        self._rows: dict[str, dict] = {}
        if file.exists():
            self._rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}

    def say(self, name: str, about: Any) -> None:
        """Add what holds for all rows and write the file."""
        self._about[name] = about
        self._write()

    def keep(self, row: Row) -> None:
        """Add a row and write the file."""
        self._rows[row.name] = row.as_json()
        self._write()

    def tables(self) -> str:
        """Return the rows as tables in Markdown."""
        return tables(list(self._rows.values()))

    def _write(self) -> None:
        result = {**self._about, "rows": list(self._rows.values())}
        record.write(self._file, result)


def parse_args() -> argparse.Namespace:
    """Return what to measure, of which model, and where to write it."""
    parser = argparse.ArgumentParser(prog="python -m bench.esft_speed", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--model", choices=tuple(SHAPES), default="deepseek-v2-lite")
    parser.add_argument("--layers", type=int, help="layers with experts (default: all)")
    parser.add_argument("--adapters", type=int, default=max(ADAPTERS))
    text = "prompts' tokens; none leaves prefill out everywhere"
    parser.add_argument("--prefill-tokens", type=int, nargs="*", default=PREFILL, help=text)
    parser.add_argument("--decode-rows", type=int, nargs="+", default=DECODE)
    text = "of every step: by the clock, fewer where it is long, and by the profiler"
    parser.add_argument("--samples", type=int, nargs=2, default=SAMPLES, help=text)
    text = "folder of programs that bench.esft_programs has compiled before"
    parser.add_argument("--programs", type=Path, help=text)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--seconds", type=float, default=60, help="time limit of each part, in seconds"
    )
    return parser.parse_args()


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return rows, tokens and samples of the steps; a tiny model has small ones."""
    small = args.model == "tiny"
    return {
        "decode": (1, 8) if small else tuple(args.decode_rows),
        "samples": args.samples,
        "prefill": tuple(min(tokens, 32) if small else tokens for tokens in args.prefill_tokens),
        "context": 32 if small else CONTEXT,
        "longest": 32 if small else max(*PREFILL, *args.prefill_tokens),
    }


def main() -> None:
    """Make the model, load the adapters, run the parts, and write what came out."""
    args = parse_args()
    start = time.monotonic()
    say = lambda text: print(f"[{time.monotonic() - start:5.1f} s] {text}", flush=True)  # noqa: E731
    layers = {} if args.layers is None else {"layers": args.layers}
    shape = SHAPES[args.model](args.adapters, **layers)
    sizes = sizes_of(args)
    programs = Programs(shape, sizes, args.programs)
    begin(programs, shape, args.only, sizes)
    multi_esft = MultiEsftModel(shape)
    programs.attach(multi_esft)
    say(f"{shape.name}, experts in {multi_esft.tensors.pages()}")
    for adapter in range(len(shape.counts)):
        multi_esft.load(adapter)
    say(f"{len(shape.counts)} adapters in {multi_esft.tensors.pages()}")
    bandwidth = copy_bandwidth(1 << 20 if args.model == "tiny" else 1 << 31)
    measurement = Measurement(multi_esft, programs, bandwidth, sizes)
    say(f"copies {measurement.bandwidth / 1e12:.2f} TB/s")
    device = record.jax_device()
    about = {
        **record.about(device),
        "model": shape.name,
        "layers": len(multi_esft.tensors.layers),
        "copy_tb_per_s": measurement.bandwidth / 1e12,
    }
    results = Results(args.out / f"esft_speed_{record.in_file_name(device)}.json", about)
    measure(measurement, args.only, args.seconds, results.keep)
    print(results.tables())
    results.say("beside_bytes", beside := programs.beside_bytes())
    say(f"measured; beside weights and KV {sum(beside.values())} bytes: {beside}")
    multi_esft.close()


if __name__ == "__main__":
    main()
