"""Base model of an engine: loaded weights and what was set up around them."""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.config import ModelConfig
from lora_jax.hub_folder import folder_name
from lora_jax.models.weight_sizes import WeightSizes, weight_sizes
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.output_norms import OutputNorms
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.api.load_format import WeightSource
from serving.engine.memory.given_ranks import usual_rank
from serving.engine.memory.memory_budget import size_kv_cache
from serving.engine.memory.page_pool import PagePoolParts, make_page_pool
from serving.engine.memory.sizing import CacheSize, lora_share
from serving.engine.parts.brought_parts import take_brought
from serving.engine.parts.devices import held_locally, local_widths, log_devices
from serving.engine.parts.engine_start import EngineStart
from serving.engine.parts.head_parts import take_heads
from serving.engine.parts.image_parts import ImageParts, take_tower
from serving.engine.parts.merging import make_merged
from serving.engine.parts.model_info import catalogue_of, log_quantised
from serving.engine.parts.needed_sizes import head_labels
from serving.engine.parts.over_hosts import shared
from serving.engine.parts.target_parts import take_sites, take_targets
from serving.loading.esft_parts import EsftParts, make_esft
from serving.lora_server.sides import RemoteAccess, RemoteSide
from serving.runtime.gang import Gang
from serving.steps.merged_weights import MergedWeights

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedBase:
    """A model that is loaded, and what was set up around it."""

    model: AbstractCausalLM
    config: ModelConfig
    source: WeightSource
    weights: WeightSizes
    dtype: jnp.dtype  # of the embedding, and of what a layer hands on
    catalogue: LoraCatalogue  # all modules that adapters may be on, and their heads
    local_catalogue: LoraCatalogue  # those of which slots hold every adapter; see held_locally
    num_full_adapters: int  # that slots hold with all modules
    lora_share: float  # of free memory that adapters take at most
    usual_rank: int | None  # the largest of adapters; None: up to max_lora_rank
    size: CacheSize
    esft: EsftParts | None
    remote: RemoteSide | None
    split: Split | None
    widths: LocalWidths | None  # of the split
    images: ImageParts | None
    merged: MergedWeights | None
    norms: OutputNorms | None  # where adapters may scale outputs
    pool: PagePoolParts | None = None


def load_base(
    start: EngineStart,
    adapters: Mapping[str, str | os.PathLike[str]],
    access: RemoteAccess | None,
    gang: Gang | None,
    undo: ExitStack,
) -> LoadedBase:
    """Load the weights and set up what lies beside them; `undo` closes what a failed start leaves.

    Raises ValueError for what cannot be served, and ConnectionError when the LoRA Server of
    `access` cannot be reached or does not fit.
    """
    config, split = start.config, start.split
    model, model_config, dtype, weights = load_model(config, start.source, split)
    images = take_tower(config, model, model_config, dtype)
    remote = None if access is None else access.open(config, dtype.name)
    if remote is not None:
        undo.callback(remote.close)
    esft = make_esft(config, model, model_config, split)
    if esft is not None:
        undo.callback(esft.room.close)
    labels = shared(gang, head_labels(config, adapters, remote is not None))
    modules = catalogue_of(model, model_config)
    is_shared = start.source.is_shared
    modules = take_targets(model, modules, config, adapters, gang, is_shared=is_shared)
    modules = take_sites(model, modules, remote)
    catalogue = take_heads(model, modules, model_config.hidden_size, labels)
    has_server = remote is not None
    catalogue, norms = take_brought(model, catalogue, config, adapters, has_server=has_server)
    merged = make_merged(config, model)  # which names modules as the slots do
    widths = local_widths(split)
    local_catalogue, num_full_adapters = held_locally(catalogue, remote, widths)
    share, rank = lora_share(config, len(adapters)), usual_rank(config, adapters)
    # KV pages may lie where the experts were.
    pool = make_page_pool(config, model, model_config, local_catalogue, dtype, esft)
    if pool is not None:
        undo.callback(pool.room.close)
        size = pool.size
    else:
        cache_bytes = 0 if images is None else images.cache_bytes
        beside = num_full_adapters, cache_bytes, config.tensor_parallel_size
        held = model, model_config, local_catalogue, dtype
        size = shared(gang, size_kv_cache(config, *held, *beside, share=share, rank=rank))
    return LoadedBase(
        model=model,
        config=model_config,
        source=start.source,
        weights=weights,
        dtype=dtype,
        catalogue=catalogue,
        local_catalogue=local_catalogue,
        num_full_adapters=num_full_adapters,
        lora_share=share,
        usual_rank=rank,
        size=size,
        esft=esft,
        remote=remote,
        split=split,
        widths=widths,
        images=images,
        merged=merged,
        norms=norms,
        pool=pool,
    )


def load_model(
    config: EngineConfig, source: WeightSource, split: Split | None
) -> tuple[AbstractCausalLM, ModelConfig, jnp.dtype, WeightSizes]:
    """Return the model, its config, the dtype of its embedding, and its sizes, which are logged."""
    start = time.monotonic()
    wanted = None if config.dtype == "auto" else jnp.dtype(config.dtype)
    model, model_config = source.load_model(config.model, dtype=wanted, split=split)
    sizes = weight_sizes(model)
    dtype = jax.tree.leaves(nnx.state(model.embed))[0].dtype
    logger.info(
        "Model %s: %s, %.1f M parameters, %.1f MB, %s, loaded in %.1f s.",
        folder_name(config.model),
        model_config.model_type,
        sizes.parameters / 1e6,
        sizes.num_bytes / 1e6,
        dtype.name,
        time.monotonic() - start,
    )
    if wanted is None and model_config.dtype == "float16":
        on_cpu = jax.default_backend() == "cpu"
        fast = "" if on_cpu else " The fast kernels of this device are for bfloat16."
        logger.log(
            logging.INFO if on_cpu else logging.WARNING,
            "The model's files say float16, which is computed in float32. --dtype bfloat16 halves "
            "the memory of KV pages, adapters and weights that are not quantised.%s",
            fast,
        )
    log_quantised(model_config, sizes)
    log_devices(split)
    return model, model_config, dtype, sizes
