"""A LoRA Server on several GPUs of one host: `python -m bench.lora_server --out DIR`.

Layers of Mixtral 8x7B's shape with adapters of rank 64 of all three matrices of its eight experts
(InfiniLoRA, Table 4): every (token, expert) row goes to the server over NVLink before the base
computation, and its deltas, in bfloat16, are added behind it. Every GPU has a process of its own
and is an instance or a rank of the server; both are programs of jax whose exchanges are custom
calls. Processes that share a GPU (`--gpus 0 0 1`) take turns of it, as the driver gives them.

Rows per layer, microseconds. `receive`: both requests of a layer and an empty answer. `send`: what
answers of the full size add to that. `lora`: what the adapters' products add to that. `exchange`:
all of it, one after the other. `base`: the experts' three matrices, as batched products of equal
groups. `overlap`: base and exchange as they are served; of several instances the slowest one's.
`exposed`: overlap less base. `overlap_echo` and `overlap_refused`: overlap while servers send back
what nobody computed, or nothing: what its own pushes and sums cost the instance.

An instance and all ranks of EP4 want five GPUs, of EP4-PP2 nine. A rank on the instance's GPU would
take its SMs and memory, and as a process of its own turns of milliseconds. So plans with some of
their ranks leave the rows of the others out, which says too little of what the instance sends and
adds; with `all rows` its batch is so much larger that it sends as many as to all ranks, each of
which then has more than its share. What all ranks would take lies between the two. Of several
stages those whose ranks are all there have their layers measured; with two instances all layers
are, those of the other stage with the rows of its ranks that are there.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import record
from bench.gpus import count_gpus
from bench.lora_server.plans import (
    ECHO,
    LORA,
    PLANS,
    REFUSE,
    Case,
    MeasuredPlan,
    mixtral,
    table_for,
)
from bench.lora_server.timeline import shown
from bench.lora_server.worker import ProcessWorker, Worker, all_of

_STATUS = {
    LORA: 0,
    ECHO: 0,
    REFUSE: 3,
}  # transport.base.Status, by what servers do


class Bench:
    """A worker for each GPU, and the folder where they meet."""

    def __init__(self, workers: Sequence[Worker], folder: str, case: Case):
        self.workers, self.case = workers, case
        self._folder, self._meetings = folder, 0
        self._base: dict[tuple[Case, int, int], float] = {}

    def set_case(self, case: Case) -> None:
        """Measure another case from now on."""
        self.case = case
        all_of([worker.start("set_case", case) for worker in self.workers])

    def measure(self, plan: MeasuredPlan, tokens: int) -> dict:
        """Return the plan's row; `tokens` are the batch's that it stands for."""
        instances, servers = self._roles(plan)
        tokens = plan.tokens(self.case, tokens)
        results: dict = {"tokens": tokens, "base": self._base_us(tokens, instances)}
        try:
            self._connect(plan, tokens, instances, servers)
            if plan.instances == 1:
                results |= self._parts(instances[0], servers)
            results |= self._overlap(instances)
            if plan.instances == 1:
                results |= self._own(instances, servers)
        finally:
            for group in (instances, servers):
                all_of([worker.start("leave") for worker in group])
        results["exposed"] = results["overlap"] - results["base"]
        results["exposed_share"] = results["exposed"] / results["base"]
        return results

    def trace(self, plan: MeasuredPlan, tokens: int, out: Path) -> None:
        """Write what ran on the first instance and the first rank, overlapped, as text."""
        instances, servers = self._roles(plan)
        tokens = plan.tokens(self.case, tokens)
        try:
            self._connect(plan, tokens, instances, servers)
            all_of([worker.start("warm_overlap") for worker in instances])
            seen = {"instance": instances[0], "server": servers[0]}
            folders = {name: f"{self._folder}/trace-{name}" for name in seen}
            for what in ("exchange", "overlap"):
                for name, worker in seen.items():
                    worker.call("begin_trace", folders[name] + what)
                for worker in instances:
                    worker.call(what)
                for name, worker in seen.items():
                    events = worker.call("end_trace", folders[name] + what)
                    (out / f"{what}_{name}.txt").write_text(shown(events))
        finally:
            for group in (instances, servers):
                all_of([worker.start("leave") for worker in group])

    def _roles(self, plan: MeasuredPlan) -> tuple[Sequence[Worker], Sequence[Worker]]:
        """Return instances, the first workers, and servers, the last."""
        return self.workers[: plan.instances], self.workers[-plan.servers :]

    def _base_us(self, tokens: int, instances: Sequence[Worker]) -> float:
        """Return the slowest instance's base, all at the same time: some may share a GPU."""
        known = self.case, tokens, len(instances)
        if known not in self._base:
            all_of([worker.start("base", tokens) for worker in instances])  # compiles
            self._base[known] = max(all_of([worker.start("base", tokens) for worker in instances]))
        return self._base[known]

    def _connect(
        self,
        plan: MeasuredPlan,
        tokens: int,
        instances: Sequence[Worker],
        servers: Sequence[Worker],
    ) -> None:
        self._meetings += 1
        ranks = range(plan.placement(self.case).devices)
        paths = [f"{self._folder}/{self._meetings}-{rank}" for rank in ranks]
        all_of(
            [
                worker.start("serve", plan.name, tokens, rank, paths[rank])
                for rank, worker in enumerate(servers)
            ]
        )
        for rank in range(len(servers), len(paths)):
            servers[-1].call("hold_place", plan.name, tokens, rank, paths[rank])
        all_of(
            [
                worker.start("connect", plan.name, tokens, paths, number)
                for number, worker in enumerate(instances)
            ]
        )

    def _parts(self, instance: Worker, servers: Sequence[Worker]) -> dict:
        """Return the rows of Table 4, by what each thing that servers do adds."""
        results: dict = {"error": instance.call("error")}
        took = {}
        for mode in (ECHO, REFUSE, LORA):
            self._set_mode(servers, mode)
            took[mode], status = instance.call("exchange")
            if status != _STATUS[mode]:
                raise RuntimeError(f"status {status} when servers do {mode}")
        results |= {"receive": took[REFUSE], "send": took[ECHO] - took[REFUSE]}
        return results | {"lora": took[LORA] - took[ECHO], "exchange": took[LORA]}

    def _overlap(self, instances: Sequence[Worker], mode: int = LORA) -> dict:
        all_of([worker.start("warm_overlap") for worker in instances])
        results = all_of([worker.start("overlap") for worker in instances])
        if any(status != _STATUS[mode] for _, status in results):
            raise RuntimeError(f"statuses {[status for _, status in results]} of overlap")
        return {"overlap": max(took for took, _ in results), "waited": instances[0].call("waited")}

    def _own(self, instances: Sequence[Worker], servers: Sequence[Worker]) -> dict:
        """Return a layer's time when servers echo, or refuse: what is left is the instance's."""
        results = {}
        for name, mode in (("overlap_echo", ECHO), ("overlap_refused", REFUSE)):
            self._set_mode(servers, mode)
            results[name] = self._overlap(instances, mode)["overlap"]
        return results

    def _set_mode(self, servers: Sequence[Worker], mode: int) -> None:
        for worker in servers:
            worker.call("set_mode", mode)


def rows_of_table(
    bench: Bench, wanted: Sequence[tuple[MeasuredPlan, int]], end: float
) -> Iterator[dict]:
    """Yield each plan's row of a batch, until the time is over; what fails says so in its row."""
    for plan, tokens in wanted:
        name = {"plan": plan.name, "batch": tokens, "adapters": bench.case.adapters}
        if plan.gpus > len(bench.workers):
            yield name | {"left_out": f"needs {plan.gpus} GPUs"}
        elif time.monotonic() > end:
            yield name | {"left_out": "no time left"}
        else:
            start = time.monotonic()
            try:
                results = bench.measure(plan, tokens)
            except RuntimeError as error:
                results = {"failed": str(error)[:400]}
            yield name | results | {"took_s": time.monotonic() - start}


def line_of(row: dict) -> str:
    """Return one line of the table."""
    numbers = {k: v for k, v in row.items() if isinstance(v, float)}
    rest = [str(v) for k, v in row.items() if k not in numbers]
    values = [f"{k} {v:.3g}" if abs(v) < 2 else f"{k} {v:.0f}" for k, v in numbers.items()]
    return ", ".join(rest) + ": " + ", ".join(values)


def main() -> None:
    """Measure every plan that fits the GPUs, and write one JSON after each."""
    parser = argparse.ArgumentParser(prog="python -m bench.lora_server", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[256, 512])
    parser.add_argument(
        "--plans", nargs="+", help="plans to run, in this order (default: by number of GPUs)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="start no new row after this time, in seconds"
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="GPU numbers; each gets a process")
    parser.add_argument("--trace", nargs="+", default=[], help="plans whose kernels are traced")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.gpus = options.gpus or list(range(count_gpus(os.environ)))
    if not options.gpus:
        parser.error("no NVIDIA GPU is visible, and each process needs one")
    if options.plans:
        wanted = list(itertools.product(options.adapters, options.plans, options.batches))
    else:
        wanted = list(table_for(len(options.gpus)))
    end, case = time.monotonic() + options.seconds, mixtral(wanted[0][0])
    workers = [ProcessWorker(case, gpu) for gpu in options.gpus]
    try:
        for worker in workers:
            worker.wait_ready()
        with tempfile.TemporaryDirectory() as folder:
            _measure_all(Bench(workers, folder, case), wanted, options, end)
    finally:
        for worker in workers:
            worker.close()


def _measure_all(
    bench: Bench, wanted: list[tuple[int, str, int]], options: argparse.Namespace, end: float
) -> None:
    case = bench.case
    result: dict = {
        **record.about(f"{len(set(options.gpus))} x {bench.workers[0].call('kind')}"),
        "shape": f"{case.name}, rank {case.rank}, Zipf 1.2, {case.layers} layers",
        "gpus": options.gpus,  # of the workers: instances first, servers last
        "rows": [],
    }
    for adapters, rows in itertools.groupby(wanted, lambda row: row[0]):
        bench.set_case(mixtral(adapters))
        for row in rows_of_table(bench, [(PLANS[plan], tokens) for _, plan, tokens in rows], end):
            print(line_of(row), flush=True)
            result["rows"].append(row)
            record.write(options.out / "lora_server.json", result)
    for name in options.trace:
        folder = options.out / name.replace(", ", "_").replace(" ", "_")
        folder.mkdir(exist_ok=True)
        bench.trace(PLANS[name], options.batches[0], folder)


if __name__ == "__main__":
    main()
