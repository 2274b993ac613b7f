"""Base model of an engine: loaded weights and what was set up around them."""

import dataclasses
import logging
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.config import ModelConfig
from lora_jax.models.weight_sizes import WeightSizes, weight_sizes
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.output_norms import OutputNorms
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.api.load_format import WeightSource
from serving.engine.memory.page_pool import PagePoolParts
from serving.engine.memory.sizing import CacheSize
from serving.engine.parts.devices import log_devices
from serving.engine.parts.image_parts import ImageParts
from serving.engine.parts.model_info import log_quantised
from serving.loading.esft_parts import EsftParts
from serving.lora_server.instance import InstanceSide
from serving.lora_server.tenant_side import TenantSide
from serving.steps.merged_weights import MergedWeights

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedBase:
    """A model that is loaded, and what was set up around it."""

    model: AbstractCausalLM
    config: ModelConfig
    source: WeightSource
    catalogue: LoraCatalogue  # all modules that adapters may be on, and their heads
    dtype: jnp.dtype
    size: CacheSize
    esft: EsftParts | None
    remote: InstanceSide | TenantSide | None
    split: Split | None
    widths: LocalWidths | None  # of the split
    images: ImageParts | None
    merged: MergedWeights | None
    norms: OutputNorms | None  # where adapters may scale outputs
    pool: PagePoolParts | None = None


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
        Path(config.model).name,
        model_config.model_type,
        sizes.parameters / 1e6,
        sizes.num_bytes / 1e6,
        dtype.name,
        time.monotonic() - start,
    )
    log_quantised(model_config, sizes)
    log_devices(split)
    return model, model_config, dtype, sizes
