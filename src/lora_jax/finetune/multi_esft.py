"""Several ESFT adapters beside one base in virtual weight tensors, placed as servers place them."""

from collections.abc import Sequence

import jax
import numpy as np

from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertPlacement, ExpertSizes
from lora_jax.adapters.weights import PROJECTIONS, ExpertWeights
from lora_jax.memory.platforms import for_platform
from lora_jax.models.expert_tensors import ExpertTensors
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Int


class MultiEsftModel:
    """Moves a model's experts into weight tensors and puts adapters' experts behind them.

    `reroute_tables[place, slot, expert]` says where an expert of slot's adapter lies; slots are in
    the order of the adapters. Close it when nothing runs the model any more.
    """

    reroute_tables: Int[np.ndarray, "moe_layers esft_slots experts"]

    def __init__(self, model: AbstractCausalLM, adapters: Sequence[ExpertWeights]):
        """Raise NotImplementedError where no memory can be mapped (a TPU, a host but Linux).

        ValueError when the model has no experts or there is no adapter.
        """
        if not adapters:
            raise ValueError("there is no adapter")
        most = max((len(e) for a in adapters for e in a.experts.values()), default=0)
        memory = for_platform(jax.default_backend())
        self._tensors = ExpertTensors(model, memory, extra=len(adapters) * most)
        sizes = ExpertSizes(
            self._tensors.layers, self._tensors.num_experts, most, self._tensors.expert_bytes
        )
        allocator = ExpertAllocator(len(adapters), sizes)
        placements = [allocator.place(adapter) for adapter in adapters]
        for placement in placements:
            self._write(placement)
        self.reroute_tables = np.stack([p.table for p in placements], axis=1)

    def _write(self, placement: ExpertPlacement) -> None:
        for layer, indices in placement.indices.items():
            self._tensors.map_all(layer, indices.values())
            for expert, index in indices.items():
                matrices = placement.weights.experts[layer][expert]
                for name, matrix in zip(PROJECTIONS, matrices, strict=True):
                    self._tensors.write(layer, index, name, matrix)

    def close(self) -> None:
        """Give the memory back; the model cannot be used after it."""
        self._tensors.close()
