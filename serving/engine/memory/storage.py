"""Dtypes in which an engine keeps adapters and KV pages."""

from collections.abc import Callable

import jax.numpy as jnp

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.nn.output_norms import OutputNorms
from lora_jax.ops.kv_rows import CODED
from serving.api.config import EngineConfig

INT8 = "int8"  # lora_dtype


def kv_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of KV pages: the model's, or that of rows in 8 bits (ops.kv_rows)."""
    return CODED if config.kv_cache_dtype == "fp8" else dtype


def lora_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of rank rows: the model's, or int8 for rows in 8 bits."""
    return jnp.dtype(jnp.int8) if config.lora_dtype == INT8 else dtype


def host_form(
    config: EngineConfig,
    catalogue: LoraCatalogue,
    widths: LocalWidths | None,
    norms: OutputNorms | None = None,
    *,
    copied_as: jnp.dtype | None = None,
) -> Callable[[AdapterWeights], AdapterWeights]:
    """Return what makes of a LoRA adapter's files what the host keeps of them.

    `norms` are those of a model whose outputs adapters may scale. Rows that the host copies to the
    device as they are, it keeps in the dtype `copied_as`: to round 160 MB takes longer than to copy
    them. Where adapters are merged it keeps the file's, so that a merged weight is rounded once.
    """
    merges = config.lora_merge != "off" or config.merge_adapter is not None

    def form(weights: AdapterWeights) -> AdapterWeights:
        if norms is not None:
            weights = norms.resolve(weights)
        if config.lora_dtype == INT8:
            weights = weights.in_8_bits()
        elif copied_as is not None and not merges:
            weights = weights.narrowed(copied_as)
        return weights if widths is None else widths.adapter(weights, catalogue)

    return form
