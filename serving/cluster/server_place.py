"""The LoRA Server that a cluster's options ask for, and how its instances find it. No HTTP."""

import dataclasses
from pathlib import Path

from lora_jax.config import ModelConfig
from lora_jax.models.loader import read_config
from lora_jax.placement.chooser import default_placement
from lora_jax.placement.shape import adapter_shape
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.api.load_format import weight_source
from serving.lora_server.calls import Caller, RemoteLeases
from serving.lora_server.instance import ServerAccess
from serving.lora_server.spec import ServerSpec, design
from serving.lora_server.transport import selection
from serving.lora_server.transport.base import AbstractClient
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.selection import RankPlace
from serving.lora_server.transport.world import World


@dataclasses.dataclass(frozen=True)
class ServerPlace:
    """Places of the LoRA Server's ranks, and the options of its use."""

    spec: ServerSpec
    ranks: tuple[RankPlace, ...]
    cluster: ClusterConfig
    world: World | None = None  # that ranks and instances join
    instance: int = 0  # number of the one that gets this


def server_spec(engine: EngineConfig, cluster: ClusterConfig) -> ServerSpec | None:
    """Return the LoRA Server that the options ask for, None without one.

    Raises ValueError for what is impossible, and says what to change.
    """
    if not cluster.lora_server:
        return None
    if cluster.lora_server_transport == selection.NVSHMEM and engine.tensor_parallel_size > 1:
        raise ValueError(
            "--lora-server-transport nvshmem has one GPU for each process, and --tensor-parallel-"
            f"size {engine.tensor_parallel_size} gives an instance several: leave one of them out."
        )
    folder, ranks = Path(engine.model), cluster.lora_server
    config = read_config(folder)
    adapters = cluster.lora_server_adapters or engine.max_loras * cluster.instances
    if adapters < engine.max_loras:
        raise ValueError(
            f"The LoRA Server would hold {adapters} adapters, but a batch may use "
            f"{engine.max_loras}; raise --lora-server-adapters or lower --max-loras."
        )
    shape = adapter_shape(config, adapters, engine.max_lora_rank, 4)
    assert config.moe is not None, "a shape of experts without experts"
    placement = cluster.placement or default_placement(shape, ranks, ranks).name.lower()
    spec = ServerSpec(
        model=engine.model,
        dtype=_dtype(engine, config),
        placement=placement,
        ranks=ranks,
        num_adapters=adapters,
        max_rank=engine.max_lora_rank,
        max_rows=engine.step_tokens * config.moe.top_k,
        byte_budget=cluster.lora_server_memory_bytes,
        host_bytes=engine.max_total_adapter_bytes,
        layerwise=cluster.layerwise_loading,
        transport=_transport(cluster),
        attention=cluster.lora_attention == "remote",
        load_format=engine.load_format,
        lora_dtype=engine.lora_dtype,
        implementation=None if cluster.lora_kernel == "fast" else cluster.lora_kernel,
    )
    design(spec)
    return spec


def _transport(cluster: ClusterConfig) -> str:
    """Return the transport that both sides take: between hosts there is a default of its own."""
    chosen = cluster.lora_server_transport
    is_far = cluster.uses_ray or cluster.has_nodes
    return selection.TCP if is_far and chosen == selection.AUTO else chosen


def _dtype(engine: EngineConfig, config: ModelConfig) -> str:
    """Return the dtype of the base model as the engine will have it."""
    if engine.dtype != "auto":
        return engine.dtype
    return weight_source(engine.load_format).model_dtype(config, Path(engine.model)).name


def server_access(place: ServerPlace, caller: Caller, name: str) -> ServerAccess:
    """Return how the instance of this name reaches the server at a place; leases by `caller`."""

    def connect(terms: Terms, device: int) -> AbstractClient:
        transport, separate = place.spec.transport, place.cluster.lora_separate_stream
        options = {"separate_stream": separate, "device": device}
        if (world := place.world) is not None:
            options["world"] = world, world.pe_of_instance(place.instance)
        return selection.open_client_at(place.ranks, terms, transport, **options)

    return ServerAccess(
        place.spec,
        name,
        RemoteLeases(caller),
        connect,
        place.cluster.lora_server_wait_s,
        place.cluster.local_expert_slots,
        place.cluster.lora_overlap,
        place.cluster.lora_prefetch,
    )
