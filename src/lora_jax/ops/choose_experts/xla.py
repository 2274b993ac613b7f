"""The choice of experts with sums of one order: portable JAX."""

import jax
import jax.numpy as jnp

from lora_jax.config import MoeConfig
from lora_jax.ops.choose_experts.reference import top_k
from lora_jax.ops.row_sum import row_sum
from lora_jax.typing import Array, Float, Int


def choose_experts(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Same result as the reference; differentiable.

    The order of the logits is the order of their softmax, so that top-k needs no softmax.
    """
    allowed = _best_groups_only(logits, moe) if moe.num_groups > 1 else logits
    best, ids = top_k(allowed, moe.top_k)
    highest, _ = jax.lax.top_k(logits, 1)
    weights = jnp.exp(best - highest)
    weights = weights / row_sum(jnp.exp(logits - highest) if moe.softmax_first else weights)
    if moe.topk_norm is not None:
        power = jnp.float32(moe.topk_norm)
        weights = weights / row_sum(weights**power) ** (1 / power)
    return weights * jnp.float32(moe.weight_scale), ids


def _best_groups_only(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> Float[Array, "tokens experts"]:
    """Return logits with -inf outside the groups whose best expert is among the best."""
    grouped = logits.reshape(logits.shape[0], moe.num_groups, -1)
    best_of_group = jax.lax.top_k(grouped, 1)[0][..., 0]
    _, best = top_k(best_of_group, moe.topk_groups)
    groups = jnp.arange(moe.num_groups, dtype=best.dtype)
    chosen = jnp.any(best[:, :, None] == groups[None, None, :], axis=1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(logits.shape)
