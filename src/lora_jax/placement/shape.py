"""The block of adapter weights that a LoRA Server spreads over its devices. No jax."""

import dataclasses

from lora_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """`adapters` x `layers` x `experts` units of `unit_bytes` each (InfiniLoRA, section 4.1).

    A unit is what one adapter changes in one expert of one layer. `adapters` counts the adapters
    held at a time (slots); `layers` counts the layers that have experts. Raises ValueError for
    sizes below one.
    """

    adapters: int
    layers: int
    experts: int
    unit_bytes: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a whole number from 1 on, got {value!r}.")

    @property
    def adapter_bytes(self) -> int:
        """Bytes of one adapter on all layers and experts (Mem_LoRA of section 4.2)."""
        return self.layers * self.experts * self.unit_bytes


def expert_lora_bytes(hidden_size: int, intermediate_size: int, rank: int, itemsize: int) -> int:
    """Return the bytes of rank-`rank` A and B on the gate, up and down maps of one expert.

    rank * (d_in + d_out) * itemsize for each map; d_in + d_out is hidden + intermediate for all
    three. Mixtral 8x7B at rank 64 in bfloat16 gives 1.8 GB per adapter.
    """
    return 3 * rank * (hidden_size + intermediate_size) * itemsize


def adapter_shape(config: ModelConfig, adapters: int, rank: int, itemsize: int) -> AdapterShape:
    """Return the shape of `adapters` adapters on all experts of a model.

    Raises ValueError for a model without experts.
    """
    if config.moe is None:
        raise ValueError(
            f"A LoRA Server holds adapters of experts, and {config.model_type} has none in this "
            "config; choose a mixture-of-experts model, or serve the adapters beside the model."
        )
    moe = config.moe
    return AdapterShape(
        adapters=adapters,
        layers=len(moe.layers),
        experts=moe.num_experts,
        unit_bytes=expert_lora_bytes(config.hidden_size, moe.intermediate_size, rank, itemsize),
    )
