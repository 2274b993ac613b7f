"""Adapters of a split model: the part of every matrix that a device has. No jax.

A device has a map's inputs whole and a part of its outputs, so A lies whole on each device and B in
parts; of experts that are split it has both matrices of its own. All devices have equally many
rank rows of each width, at the same places, so that one table serves them all.
"""

import dataclasses

import numpy as np

from lora_jax.adapters.catalogue import (
    EXPERT_MODULES,
    EXPERTS,
    WHOLE,
    LoraCatalogue,
    LoraModule,
)
from lora_jax.adapters.gains import gain_name
from lora_jax.adapters.weights import AdapterWeights, SiteWeights
from lora_jax.rank_rows import INT8, joined, parts, value_width

_OUTPUT_MAPS = ("o_proj", gain_name("o_proj"))  # of attention


@dataclasses.dataclass(frozen=True)
class LocalWidths:
    """Sizes of a split: of how many devices, and what each has whole."""

    devices: int
    whole_experts: bool
    vocab_multiple: int
    whole_attention_output: bool = False

    def catalogue(self, catalogue: LoraCatalogue) -> LoraCatalogue:
        """Return the catalogue of what one device has of every module."""
        modules = {name: self._local(module) for name, module in catalogue.modules.items()}
        return dataclasses.replace(catalogue, modules=modules)

    def adapter(self, weights: AdapterWeights, catalogue: LoraCatalogue) -> AdapterWeights:
        """Return the adapter with matrices [experts, rank, devices, local width].

        They are views, but where a vocabulary is padded; `catalogue` is of whole modules. Sites
        that share a matrix share what is made of it.
        """
        cuts: dict[tuple[int, bool, int], np.ndarray] = {}

        def cut(matrix: np.ndarray, module: LoraModule, width: int) -> np.ndarray:
            by_expert = matrix.shape[0] > 1 and self._splits_experts(module)
            key = id(matrix), by_expert, width
            if key not in cuts:
                cuts[key] = self._cut(matrix, by_expert, width)
            return cuts[key]

        sites = {}
        for (name, layer), site in weights.sites.items():
            module = catalogue.modules[name]
            local = self._local(module)
            a, b = cut(site.a, module, module.d_in), cut(site.b, module, local.d_out)
            sites[name, layer] = SiteWeights(a, b, site.scaling)
        return dataclasses.replace(weights, sites=sites)

    def _splits_experts(self, module: LoraModule) -> bool:
        return module.split == EXPERTS or (module.name in EXPERT_MODULES and self.whole_experts)

    def _local(self, module: LoraModule) -> LoraModule:
        if module.split == WHOLE or (self.whole_attention_output and module.name in _OUTPUT_MAPS):
            return module
        if self._splits_experts(module):
            return dataclasses.replace(module, num_experts=module.num_experts // self.devices)
        d_out = module.d_out
        if module.name == "lm_head":
            d_out = -(-d_out // self.vocab_multiple) * self.vocab_multiple
        return dataclasses.replace(module, d_out=d_out // self.devices)

    def _cut(self, matrix: np.ndarray, by_expert: bool, width: int) -> np.ndarray:
        """Return [experts, rank, devices, width] of a matrix [experts or 1, rank, wide]."""
        experts, rank, items = matrix.shape
        if by_expert:
            by_device = matrix.reshape(self.devices, experts // self.devices, rank, items)
            return by_device.transpose(1, 2, 0, 3)
        wide = value_width(items, matrix.dtype)
        if wide == width:
            shape = (experts, rank, self.devices, items)
            return np.broadcast_to(matrix[:, :, None], shape)
        if matrix.dtype == INT8:  # each device's part has the scale of the whole row
            values, scales = parts(matrix)
            cut = self._cut_outputs(values, width)
            return joined(cut, np.broadcast_to(scales[..., None], cut.shape[:-1]))
        return self._cut_outputs(matrix, width)

    def _cut_outputs(self, matrix: np.ndarray, width: int) -> np.ndarray:
        """Return [experts, rank, devices, width] of values [experts, rank, wide], padded with 0."""
        experts, rank, wide = matrix.shape
        if wide < self.devices * width:
            padding = self.devices * width - wide
            matrix = np.pad(matrix, ((0, 0), (0, 0), (0, padding)))
        return matrix.reshape(experts, rank, self.devices, width)
