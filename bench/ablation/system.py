"""One of the systems under comparison: its processes, started, stopped for a while, and asked."""

import argparse
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from bench.ablation.instance import Instance, Setup, Told
from bench.ablation.workload import Job
from serving.cluster.config import ClusterConfig
from serving.cluster.router import Router
from serving.cluster.server_place import ServerPlace, server_spec
from serving.config import EngineConfig
from serving.lora_server.calls import serve_leases
from serving.lora_server.group import ServerGroup

COUPLED = "coupled"
_LOADING = {"layerwise_loading": False, "lora_prefetch": False}
STEPS: dict[str, dict[str, Any]] = {
    "+disagg": {"lora_overlap": False, "lora_kernel": "reference"} | _LOADING,
    "+overlap": {"lora_kernel": "reference"} | _LOADING,
    "+loading": {"lora_kernel": "reference"},
    "+kernel": {},
}
# Not of Figure 14: the whole system without one thing.
STEPS |= {
    "one graph": {"lora_aside": False},
    "no layers": {"layerwise_loading": False},
    "no prefetch": {"lora_prefetch": False},
    "neither": _LOADING,
}
FIGURE_14 = ("+disagg", "+overlap", "+loading", "+kernel")
_START_S = 60.0  # for the first request of every adapter


class System:
    """Instances, and their LoRA Server if there is one; `close` ends them."""

    def __init__(self, options: argparse.Namespace, name: str, adapters: dict[str, str]):
        """Return when all of it serves, and the adapters that are to be warm are."""
        self.name, self._told = name, list[Told]()
        self._closing = contextlib.ExitStack()
        self._group: ServerGroup | None = None
        self._instances: list[Instance] = []
        try:
            self._start(options, adapters)
            for instance in self._instances:
                instance.wait_ready(self._told.append)
            self._router = Router(len(self._instances), adapters)
            self._warm_up(list(adapters), options.warm)
        except BaseException:
            self.close()
            raise

    @property
    def num_instances(self) -> int:
        return len(self._instances)

    @property
    def device(self) -> str:
        """How many devices of which kind it uses."""
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

    def _start(self, options: argparse.Namespace, adapters: dict[str, str]) -> None:
        """Start the server, if there is one, then as many instances as there are GPUs left."""
        engine, number = engine_fields(options, self.name), options.instances + options.lora_server
        place, leases = None, None
        if self.name != COUPLED:
            number, cluster = options.instances, _cluster(options, self.name)
            spec = server_spec(EngineConfig(model=options.model, **engine), cluster)
            assert spec is not None, "a server was asked for"
            self._group = ServerGroup(spec, number)
            self._closing.callback(self._group.close)
            place = ServerPlace(spec, tuple(self._group.paths), cluster)
            leases = functools.partial(serve_leases, self._group.coordinator)
        for n in range(number):
            setup = Setup(n, options.model, adapters, engine, place)
            self._instances.append(Instance(setup, leases))
            self._closing.callback(self._instances[-1].close)

    def _send(self, number: int, job: Job) -> None:
        chosen = self._router.choose(job.adapter, len(job.prompt) + job.max_tokens)
        self._instances[chosen].send(number, job.prompt, job.adapter, job.max_tokens)

    def _warm_up(self, adapters: list[str], count: int) -> None:
        """Run a request of each of the most popular adapters, the least popular first."""
        for instance, adapter in zip(self._instances, reversed(adapters), strict=False):
            instance.send(-1, [5] * 8, adapter, 8)
        warm = adapters[:count][::-1]
        for number, adapter in enumerate(warm):
            self._send(number, Job(0.0, adapter, [5] * 8, 2))
        if not self._wait_for(len(self._instances) + len(warm), _START_S):
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


def engine_fields(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return what every instance of the system is started with."""
    return {
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_loras": options.coupled_loras if name == COUPLED else options.max_loras,
        "max_lora_rank": options.max_lora_rank,
        "max_esft_adapters": 0,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": int(options.kv_cache_gb * 2**30) or None,
        "max_total_adapter_bytes": 64 << 30,
    }


def _cluster(options: argparse.Namespace, name: str) -> ClusterConfig:
    return ClusterConfig(
        instances=options.instances,
        lora_server=options.lora_server,
        lora_server_adapters=options.server_loras,
        lora_server_wait_s=5.0,
        **STEPS[name],
    )
