"""One of the systems under comparison: its processes, started, stopped for a while, and asked."""

import argparse
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.ablation.instance import Instance, Setup, Told
from bench.ablation.workload import Job, adapter_name, popularity
from bench.gpus import count_gpus
from lora_jax.adapters.slots import rows_per_adapter
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from lora_jax.placement.assign import assign
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cluster.server_place import ServerPlace, server_spec
from serving.lora_server.group import ServerGroup

COUPLED = "coupled"
_LOADING = {"layerwise_loading": False, "lora_prefetch": False}
STEPS: dict[str, dict[str, Any]] = {
    "+disagg": {"lora_overlap": False, "lora_kernel": "reference"} | _LOADING,
    "+overlap": {"lora_kernel": "reference"} | _LOADING,
    "+loading": {"lora_kernel": "reference"},
    "+kernel": {},
}
# Not of Figure 14: the whole system without one thing, or with rows in a stream of their own.
STEPS |= {
    "aside": {"lora_separate_stream": True},
    "no layers": {"layerwise_loading": False},
    "no prefetch": {"lora_prefetch": False},
    "neither": _LOADING,
}
FIGURE_14 = ("+disagg", "+overlap", "+loading", "+kernel")
_START_S = 60.0  # for the first request of every adapter


@dataclasses.dataclass(frozen=True)
class Split:
    """Split of devices between instances and the ranks of their LoRA Server."""

    instances: int
    ranks: int
    placement: str | None = None  # on the ranks; None: experts over all of them

    @property
    def devices(self) -> int:
        return self.instances + self.ranks

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Return the split of "3+1" or "2+2:ep1-pp2". Raises ValueError for what is none."""
        devices, *placement = text.split(":", 1)
        instances, ranks = (int(part) for part in devices.split("+"))
        if instances < 1 or ranks < 1:
            raise ValueError(f"{text}: a split has an instance and a rank at least.")
        return cls(instances, ranks, *placement)

    def __str__(self) -> str:
        placement = "" if self.placement is None else f":{self.placement}"
        return f"{self.instances}+{self.ranks}{placement}"


class System:
    """Instances, and their LoRA Server if there is one; `close` ends them."""

    def __init__(
        self, options: argparse.Namespace, name: str, split: Split, adapters: dict[str, str]
    ):
        """Return when all of it serves, and the adapters that are to be warm are."""
        several = len(options.splits) > 1 and name != COUPLED
        self.name = f"{name} {split}" if several else name
        self._told = list[Told]()
        self._closing = contextlib.ExitStack()
        self._group: ServerGroup | None = None
        self._instances: list[Instance] = []
        self._home = homes(options, split.devices if name == COUPLED else split.instances)
        try:
            self._start(options, name, split, adapters)
            for instance in self._instances:
                instance.wait_ready(self._told.append)
            self._warm_up(options, list(adapters))
        except BaseException:
            self.close()
            raise

    def warm_neighbour(self, adapter: str) -> str:
        """Return the most popular adapter of the same instance."""
        return next(name for name, home in self._home.items() if home == self._home[adapter])

    @property
    def device(self) -> str:
        """Number and kind of its devices."""
        ranks = 0 if self._group is None else self._group.spec.ranks
        return f"{len(self._instances) + ranks} x {self._instances[0].device}"

    def pause(self) -> None:
        """Stop its processes: while another system is measured they take no turn of a GPU."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run again."""
        self._signal(signal.SIGCONT)

    def serve(self, work: Sequence[Job], patience: float) -> tuple[float, list[Told]]:
        """Send the jobs at their times; return when they began, and what became of them.

        What has not ended `patience` seconds after the last one was sent is aborted.
        """
        self._told.clear()
        begun = time.monotonic()
        for number, job in enumerate(work):
            time.sleep(max(0.0, begun + job.at - time.monotonic()))
            self._send(number, job)
        if not self._wait_for(len(work), patience):
            for instance in self._instances:
                instance.abort()
            self._wait_for(len(work), patience)
        return begun, list(self._told)

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self.go_on()
        self._closing.close()
        self._instances.clear()
        self._group = None

    def _start(
        self, options: argparse.Namespace, name: str, split: Split, adapters: dict[str, str]
    ) -> None:
        """Start instances, and the server, if there is one, while they make their models."""
        engine, number, place = engine_fields(options, name, split), split.devices, None
        if name != COUPLED:
            number, cluster = split.instances, _cluster(options, name, split)
            spec = server_spec(EngineConfig(model=options.model, **engine), cluster)
            assert spec is not None, "a server was asked for"
            place = ServerPlace(spec, (), cluster)
        for n in range(number):
            mine = {name: folder for name, folder in adapters.items() if self._home[name] == n}
            setup = Setup(n, options.model, mine, engine, place, options.prefilled)
            self._instances.append(Instance(setup))
            self._closing.callback(self._instances[-1].close)
        if place is not None:
            self._group = ServerGroup(place.spec, number)
            self._closing.callback(self._group.close)
            for instance in self._instances:
                instance.join(self._group.places, self._group.coordinator)

    def _send(self, number: int, job: Job) -> None:
        home = self._instances[self._home[job.adapter]]
        home.send(number, job.prompt, job.adapter, job.max_tokens)

    def _warm_up(self, options: argparse.Namespace, adapters: list[str]) -> None:
        """Run a request on each instance, then one of each of the most popular adapters.

        The least popular come first; none is of the cold ones.
        """
        least = {self._home[adapter]: adapter for adapter in adapters[: options.adapters]}
        jobs = [Job(0.0, adapter, [5] * 8, 8) for adapter in least.values()]
        for number in reversed(range(min(options.warm, options.adapters))):
            jobs.append(Job(0.0, adapter_name(number), [5] * 8, 2))
        for number, job in enumerate(jobs):
            self._send(number, job)
        if not self._wait_for(len(jobs), _START_S):
            raise TimeoutError(f"{self.name} does not answer")

    def _wait_for(self, count: int, seconds: float) -> bool:
        """Return whether so many jobs have ended in time."""
        end = time.monotonic() + seconds
        while len(self._told) < count and time.monotonic() < end:
            threading.Event().wait(0.005)
        return len(self._told) >= count

    def _signal(self, number: signal.Signals) -> None:
        ranks = [] if self._group is None else self._group.processes
        for process in (*self._instances, *ranks):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, number)


def homes(options: argparse.Namespace, instances: int) -> dict[str, int]:
    """Return the instance of every adapter: disjoint parts, by load (InfiniLoRA, section 6.1)."""
    shares = popularity(options.adapters, options.zipf).tolist() + [0.0] * options.cold
    load_of = {adapter_name(number): share for number, share in enumerate(shares)}
    return assign(load_of, instances)


def require_gpus(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raise ValueError where there are GPUs, but not one for each instance and each rank."""
    wanted = max(split.devices for split in options.splits)
    there = count_gpus(environment)
    if there < wanted and (there or "cuda" in environment.get("JAX_PLATFORMS", "")):
        raise ValueError(
            f"Instances and ranks of a LoRA Server, {' or '.join(map(str, options.splits))}, need "
            f"{wanted} GPUs; {there} are there. Ask for smaller --splits."
        )


def engine_fields(options: argparse.Namespace, name: str, split: Split) -> dict[str, Any]:
    """Return what every instance of the system is started with."""
    slots = options.coupled_loras if name == COUPLED else options.server_loras * split.ranks
    return {
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_loras": slots,
        "max_lora_rank": options.max_lora_rank,
        "max_esft_adapters": 0,
        "enable_prefix_caching": False,
        "compile_base_only_steps": False,  # every request has an adapter
        "kv_cache_memory_bytes": int(options.kv_cache_gb * 2**30) or None,
        "lora_memory_bytes": slots * _adapter_bytes(options, name),
        "max_total_adapter_bytes": 1 << 50,  # they share their bytes
    }


def _adapter_bytes(options: argparse.Namespace, name: str) -> int:
    """Return what an adapter takes on an instance."""
    config = read_config(Path(options.model))
    catalogue = model_class(config.model_type).catalogue(config)
    kept = catalogue if name == COUPLED else catalogue.without_experts()
    itemsize = 2 if config.dtype == "bfloat16" and options.dtype != "float32" else 4
    rows = rows_per_adapter(kept, options.max_lora_rank)
    return sum(width * count for width, count in rows.items()) * itemsize


def _cluster(options: argparse.Namespace, name: str, split: Split) -> ClusterConfig:
    return ClusterConfig(
        instances=split.instances,
        lora_server=split.ranks,
        placement=split.placement,
        lora_server_adapters=options.server_loras * split.ranks,
        lora_server_wait_s=5.0,
        **STEPS[name],
    )
