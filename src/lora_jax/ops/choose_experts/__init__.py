"""The experts of each token and their weights, from the router's logits."""

from lora_jax.config import MoeConfig
from lora_jax.ops.choose_experts import reference, xla
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.typing import Array, Float, Int

__all__ = ["choose_experts"]

CHOOSE_EXPERTS = Op(
    "choose_experts",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "choose_experts")),
        Implementation("xla", ANY, xla.choose_experts, stands_in=True),
        Implementation("reference", ANY, reference.choose_experts),
    ),
)


def choose_experts(
    logits: Float[Array, "tokens experts"], moe: MoeConfig, *, implementation: str | None = None
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Return the weights (float32) and ids of each token's experts, best first.

    Of equal logits the lower id is first. `implementation` "xla" is differentiable.
    """
    return CHOOSE_EXPERTS.call(implementation, logits, moe)
