"""The experts of each token, by csrc/choose_experts: one launch for seven of XLA's."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.config import MoeConfig
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

MOST_EXPERTS, MOST_CHOSEN = 512, 32


def check_choice(moe: MoeConfig) -> None:
    """Raise Declined, saying why, for a choice that the kernel does not make."""
    op, experts, k = "cuda choose_experts takes", moe.num_experts, moe.top_k
    if experts > MOST_EXPERTS or k > min(experts, MOST_CHOSEN):
        raise Declined(
            f"{op} up to {MOST_EXPERTS} experts and {MOST_CHOSEN} a token, not {experts}, {k}"
        )
    if moe.topk_norm not in (None, 1) or moe.num_groups > 1:
        wrong = f"norm {moe.topk_norm}, {moe.num_groups} groups"
        raise Declined(f"{op} no norm or norm 1 and one group of experts, not {wrong}")


def choose_experts(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Return what lora_jax.ops.choose_experts does; no derivative."""
    check_choice(moe)
    ffi.require()
    shape = (logits.shape[0], moe.top_k)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call("lora_jax_cuda_choose_experts", shapes)
    options = {"softmax_first": moe.softmax_first, "normed": moe.topk_norm is not None}
    weights, ids = call(logits, **options, scale=np.float32(moe.weight_scale))
    return weights, ids
