"""A whole LoRA Server in threads of the test, over tiny random models."""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.doubles.peer_double import EmulatedGpus

from serving import Engine, FinishReason, Sampling
from serving.lora_server.coordinator import Coordinator
from serving.lora_server.instance import ServerAccess
from serving.lora_server.rank import ServerRank
from serving.lora_server.server import RankServer
from serving.lora_server.spec import ServerDesign, ServerSpec, design
from serving.lora_server.transport import device_memory, in_process, shared_memory
from serving.lora_server.transport.base import AbstractClient, AbstractServer
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.hosts import tcp

SHAPE = TinyShape(max_positions=96, experts=4, hidden=32, width=48, layers=2)
RANKS = (2, 3, 8, 1)
PLACEMENTS = {"ep1-pp2": 2, "ep2-pp1": 2, "ep2-pp2": 4, "ep4-pp1": 4}
MAX_TOKENS = 8
ENGINE = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": MAX_TOKENS,
    "block_size": 4,
    "kv_cache_memory_bytes": 120 * 1024,
    "max_loras": 4,
    "max_lora_rank": 8,
    "max_esft_adapters": 0,
    "structured_outputs": False,
}


def engine_flags() -> list[str]:
    """Return ENGINE as flags of a command."""
    flags = []
    for field, value in ENGINE.items():
        name = field.replace("_", "-")
        flags += [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
    return flags


def write_files(folder: Path, count: int = len(RANKS)) -> tuple[str, dict[str, str]]:
    """Write a model and adapters a0, a1, ... on every linear map; return their folders."""
    tiny_checkpoint.write_model(folder / "model", SHAPE)
    for place in range(count):
        rank = RANKS[place % len(RANKS)]
        tiny_checkpoint.write_adapter(folder / f"a{place}", SHAPE, rank, seed=place)
    return str(folder / "model"), {f"a{n}": str(folder / f"a{n}") for n in range(count)}


def make_spec(model: str, placement: str, **changes) -> ServerSpec:
    values = {
        "model": model,
        "dtype": "float32",
        "placement": placement,
        "ranks": PLACEMENTS.get(placement, 1),
        "num_adapters": 4,
        "max_rank": 8,
        "max_rows": MAX_TOKENS * SHAPE.top_k,
    }
    return ServerSpec(**values | changes)


class Transport:
    """Both endpoints of a transport by its name: `open` of a rank, then `connect` to all.

    EmulatedGpus in the place of a name: ranks on the second of them, instances on the first.
    """

    def __init__(self, name: str | EmulatedGpus, ranks: int, folder: str):
        self.name, self.opened = name, [None] * ranks
        self.paths = [Path(folder, f"rank-{rank}") for rank in range(ranks)]
        self.sockets = [tcp.listen("127.0.0.1", 0) for _ in range(ranks * (name == "tcp"))]
        self.addresses = [sock.getsockname() for sock in self.sockets]
        self.secret = b"0123456789abcdef"

    def open(self, terms: Terms, rank: int) -> AbstractServer:
        if isinstance(self.name, EmulatedGpus):
            endpoints = self.name.device(1)
            self.opened[rank] = device_memory.open_server(self.paths[rank], terms, rank, endpoints)
        elif self.name == "tcp":
            self.opened[rank] = tcp.open_server(self.sockets[rank], terms, rank, self.secret)
        elif self.name == "shared_memory":
            self.opened[rank] = shared_memory.open_server(self.paths[rank], terms, rank)
        else:
            self.opened[rank] = in_process.open_server(terms.shapes)
        return self.opened[rank]

    def connect(self, terms: Terms, device: int = 0) -> AbstractClient:
        if isinstance(self.name, EmulatedGpus):
            return device_memory.open_client(self.paths, terms, self.name.device(device))
        if self.name == "tcp":
            return tcp.open_client(self.addresses, terms, self.secret)
        if self.name == "shared_memory":
            return shared_memory.open_client(self.paths, terms)
        return in_process.open_client(self.opened)


class Ranks:
    """The ranks of a server in threads, and their coordinator."""

    def __init__(self, spec: ServerSpec, transport: str | EmulatedGpus, folder: str):
        self.design: ServerDesign = design(spec)
        self.spec, self.transport = spec, Transport(transport, spec.ranks, folder)
        self.servers = [self._server(rank) for rank in range(spec.ranks)]
        self.threads = [
            threading.Thread(target=server.run, name=f"rank-{rank}", daemon=True)
            for rank, server in enumerate(self.servers)
        ]
        self.coordinator = Coordinator(self.servers, spec.num_adapters)
        for thread in self.threads:
            thread.start()
        for server in self.servers:
            server.open()

    def _server(self, rank: int) -> RankServer:
        made = self.design
        held = ServerRank(
            made.catalogue, made.layout.shard(rank), made.sizes, jnp.dtype(self.spec.dtype)
        )
        held.warm_up()
        return RankServer(
            held,
            made.layout.moe_layers,
            made.catalogue,
            lambda: self.transport.open(made.terms, rank),
        )

    def access(self, instance: str = "one", wait_s: float = 10.0) -> ServerAccess:
        """How an engine reaches them; a test waits long, since CI may be slow."""
        return ServerAccess(self.spec, instance, self.coordinator, self.transport.connect, wait_s)

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        self.coordinator.close()


@contextlib.contextmanager
def running(spec: ServerSpec, transport: str | EmulatedGpus = "in_process") -> Iterator[Ranks]:
    """The ranks of a spec, stopped afterwards."""
    with tempfile.TemporaryDirectory() as folder:  # short: sockets lie in it
        ranks = Ranks(spec, transport, folder)
        try:
            yield ranks
        finally:
            ranks.close()


def prompts_of(count: int, seed: int = 0, low: int = 3, high: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 260, rng.integers(low, high)).tolist() for _ in range(count)]


class Asked:
    """One request and what came of it; `ended` is set by its last delta."""

    def __init__(self, engine: Engine, prompt: list[int], adapter: str | None, sampling: Sampling):
        self.deltas, self.started, self.ended = [], threading.Event(), threading.Event()
        self.times = []  # of the deltas
        self.adapter = adapter
        self.id = engine.submit(prompt, adapter, sampling, on_output=self)

    def __call__(self, delta):
        self.deltas.append(delta)
        self.times.append(time.monotonic())
        self.started.set()
        if delta.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def reason(self) -> FinishReason:
        return self.deltas[-1].finish_reason


def check_ended(asked: Asked, want: list[int]) -> bool:
    """Right tokens to the end, or right tokens and then an error that says to try again (True)."""
    assert asked.ended.wait(120), f"{asked.adapter} hangs"
    if asked.reason is FinishReason.ERROR:
        assert asked.deltas[-1].retryable
        assert asked.tokens == want[: len(asked.tokens)]
    else:
        assert asked.tokens == want
    return asked.reason is FinishReason.ERROR


def answer_again(ask: Callable[[], Asked], want: list[int]) -> None:
    """Ask until the server is back, as a client would that is told to try again."""
    for _ in range(600):
        if not check_ended(ask(), want):
            return
        time.sleep(0.2)
    raise AssertionError("the server did not come back")
