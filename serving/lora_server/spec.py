"""Specification that all roles of a disaggregated system share."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax.numpy as jnp

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slots import size_slots
from lora_jax.config import ModelConfig
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from lora_jax.ops.lora_gemm import delta_dtype
from lora_jax.rank_rows import rows_nbytes
from serving.lora_server.rank import RankSizes
from serving.lora_server.shards import ShardLayout, shard_catalogue, shard_layout
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.shapes import moe_shapes

_HEADER_BYTES = 8  # of a safetensors file: how long the JSON behind them is


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """A LoRA Server as it was asked for. `dtype` is that of the base model, by its name."""

    model: str  # folder
    dtype: str
    placement: str  # "ep2-pp1"
    ranks: int
    num_adapters: int  # held at a time
    max_rank: int
    max_rows: int  # (token, expert) rows of one message
    byte_budget: int | None = None  # of rank rows on each rank
    host_bytes: int = 16 << 30  # of parts that each rank keeps in host memory
    layerwise: bool = True  # a cold adapter may be used from its first layer on
    implementation: str | None = None  # of ops.lora_gemm on the ranks; None: the fastest
    transport: str = "auto"  # serving.lora_server.transport.selection
    attention: bool = False  # adapters' attention is on the server too
    load_format: str = "auto"  # as EngineConfig's
    lora_dtype: str = "auto"  # as EngineConfig's

    @property
    def itemsize(self) -> int:
        """Bytes of a value of the adapters' pools."""
        return jnp.dtype(self.dtype if self.lora_dtype == "auto" else self.lora_dtype).itemsize


@dataclasses.dataclass(frozen=True)
class ServerDesign:
    """Design derived from a spec and the base model's config."""

    spec: ServerSpec
    config: ModelConfig
    catalogue: LoraCatalogue
    layout: ShardLayout

    @functools.cached_property
    def terms(self) -> Terms:
        """Terms that a rank and an instance must share."""
        spec, moe = self.spec, self.config.moe
        assert moe is not None, "a layout without experts"
        widths = self.config.hidden_size, moe.intermediate_size
        attention = _attention_widths(self.catalogue) if spec.attention else None
        sizes = len(self.layout.moe_layers), spec.max_rows, *widths
        deltas = delta_dtype(jnp.dtype(spec.dtype), spec.implementation).name
        shapes = moe_shapes(*sizes, spec.dtype, deltas, attention=attention)
        return Terms(base_digest(spec.model), self.layout.placement, shapes, spec.lora_dtype)

    @property
    def sizes(self) -> RankSizes:
        spec = self.spec
        return RankSizes(
            spec.num_adapters,
            spec.max_rank,
            spec.max_rows,
            spec.byte_budget,
            spec.layerwise,
            int8_rows=spec.lora_dtype == "int8",
        )

    def slot_bytes(self, rank: int) -> int:
        """Return the bytes that a rank sets aside on its device for adapters."""
        spec = self.spec
        catalogue = shard_catalogue(self.catalogue, self.layout.shard(rank))
        slots = size_slots(
            catalogue, spec.num_adapters, spec.max_rank, spec.itemsize, spec.byte_budget
        )
        return rows_nbytes(slots.rows, spec.itemsize)

    def require_rows(self, max_tokens: int) -> None:
        """Raise ValueError unless a step of `max_tokens` tokens fits into one message."""
        assert self.config.moe is not None, "a layout without experts"
        rows, most = max_tokens * self.config.moe.top_k, self.spec.max_rows
        if rows > most:
            raise ValueError(
                f"A step of {max_tokens} tokens has {rows} (token, expert) rows and the LoRA "
                f"Server takes {most} in a message; lower max_num_batched_tokens to "
                f"{most // self.config.moe.top_k}, or raise that of the LoRA Server."
            )

    def require_rank(self, max_rank: int) -> None:
        """Raise ValueError when adapters of `max_rank` are too large for the server."""
        if max_rank > self.spec.max_rank:
            raise ValueError(
                f"The instance takes adapters of rank {max_rank} and the LoRA Server of rank "
                f"{self.spec.max_rank}; start both with the same max_lora_rank."
            )


def design(spec: ServerSpec) -> ServerDesign:
    """Return the design of a spec; reads the model's config, not its weights.

    Raises ValueError for a model without experts that adapters can change, and for a placement
    that is impossible; the message says what to change.
    """
    config = read_config(Path(spec.model))
    catalogue = model_class(config.model_type).catalogue(config)
    sizes = spec.num_adapters, spec.max_rank, spec.itemsize, spec.attention
    layout = shard_layout(config, spec.placement, spec.ranks, *sizes)
    shard_catalogue(catalogue, layout.shard(0))
    if spec.byte_budget is not None:
        layout.placement.require_one(spec.byte_budget)
    return ServerDesign(spec, config, catalogue, layout)


def _attention_widths(catalogue: LoraCatalogue) -> tuple[int, int]:
    """Return the widths of q and of k and v."""
    return catalogue.modules["q_proj"].d_out, catalogue.modules["k_proj"].d_out


def base_digest(model: str) -> str:
    """Return the sha256 of a model's config, and of its weights' names, shapes and sizes.

    Not of the weights themselves: a rank that holds adapters only should not read them all.
    """
    digest, folder = hashlib.sha256(), Path(model)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
            head += file.read(min(int.from_bytes(head, "little"), 100 << 20))
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + head)
    return digest.hexdigest()
