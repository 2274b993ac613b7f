"""Room for adapters' task heads in an engine: number of labels, and the modules with it."""

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.task_head import with_head
from lora_jax.nn.decoder import AbstractCausalLM


def take_heads(
    model: AbstractCausalLM, catalogue: LoraCatalogue, hidden: int, labels: int
) -> LoraCatalogue:
    """Return what adapters may change; with `labels`, also heads, which the model then knows."""
    if labels:
        catalogue = with_head(catalogue, hidden, labels)
        model.module_names = catalogue.module_names
    return catalogue
