"""A whole LoRA Server in threads of the test, over tiny random models."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tiny_checkpoint
from tiny_checkpoint import TinyShape

from serving.lora_server.coordinator import Coordinator
from serving.lora_server.instance import ServerAccess
from serving.lora_server.rank import ServerRank
from serving.lora_server.server import RankServer
from serving.lora_server.spec import ServerDesign, ServerSpec, design
from serving.transport import in_process

SHAPE = TinyShape(max_positions=96, experts=4, hidden=32, width=48, layers=2)
RANKS = (2, 3, 8, 1)
PLACEMENTS = {"ep1-pp1": 1, "ep1-pp2": 2, "ep2-pp1": 2, "ep2-pp2": 4, "ep4-pp1": 4}
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
}


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


class Ranks:
    """The ranks of a server in threads, and their coordinator."""

    def __init__(self, spec: ServerSpec):
        self.design: ServerDesign = design(spec)
        self.spec, shapes = spec, self.design.terms.shapes
        self.transports = [in_process.open_server(shapes) for _ in range(spec.ranks)]
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
            made.catalogue, made.plan.shard(rank), made.sizes, jnp.dtype(self.spec.dtype)
        )
        held.warm_up()
        return RankServer(held, made.plan, made.catalogue, lambda: self.transports[rank])

    def access(self, instance: str = "one", wait_s: float = 10.0) -> ServerAccess:
        """How an engine reaches them; a test waits long, since CI may be slow."""
        return ServerAccess(
            self.spec,
            instance,
            self.coordinator,
            lambda terms: in_process.open_client(self.transports),
            wait_s,
        )

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        self.coordinator.close()


@contextlib.contextmanager
def running(spec: ServerSpec) -> Iterator[Ranks]:
    """The ranks of a spec, stopped afterwards."""
    ranks = Ranks(spec)
    try:
        yield ranks
    finally:
        ranks.close()


def prompts_of(count: int, seed: int = 0, low: int = 3, high: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 260, rng.integers(low, high)).tolist() for _ in range(count)]
