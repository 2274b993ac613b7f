"""Adapter files by name, a transformers model with the same LoRA merged in, and model sizes."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from support.cases.adapter_cases import write_adapter
from support.drivers.model_driver import Sites

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats import peft_format
from lora_jax.config import ModelConfig
from lora_jax.models import model_class


@dataclasses.dataclass(frozen=True)
class NamedLora:
    """Random LoRA on module paths as files name them: y += alpha / rank * (x A^T) B^T."""

    pairs: dict[str, tuple[np.ndarray, np.ndarray]]  # path -> A [rank, d_in], B [d_out, rank]
    rank: int
    alpha: int

    def read_back(self, folder: Path, catalogue: LoraCatalogue) -> Sites:
        """Write the PEFT folder, and return its sites as the reader gives them."""
        tensors = {}
        for path, (a, b) in self.pairs.items():
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        leaves = sorted({path.rsplit(".", 1)[-1] for path in self.pairs})
        config = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": leaves}
        weights = peft_format.read(write_adapter(folder, tensors, config), catalogue)
        return {at: (site.a, site.b, site.scaling) for at, site in weights.sites.items()}

    def merged_into(self, oracle: Any, weight_of: Callable[[Any, str], Any]) -> Any:
        """Return a copy of the model with the delta added in float32 to `weight_of(model, path)`.

        `weight_of` gives a view [d_out, d_in] of the parameter.
        """
        import torch

        model = copy.deepcopy(oracle)
        with torch.no_grad():
            for path, (a, b) in self.pairs.items():
                weight = weight_of(model, path)
                delta = torch.from_numpy(b @ a) * (self.alpha / self.rank)
                assert weight.shape == delta.shape, path
                weight += delta
        return model


def named_lora(shapes: dict[str, tuple[int, int]], rank: int = 3, seed: int = 0) -> NamedLora:
    """Return LoRA on every path of `shapes`, which gives (d_out, d_in)."""
    rng, pairs = np.random.default_rng(seed), {}
    for path, (d_out, d_in) in shapes.items():
        a = rng.standard_normal((rank, d_in)) * d_in**-0.5
        b = rng.standard_normal((d_out, rank)) * 0.3
        pairs[path] = a.astype(np.float32), b.astype(np.float32)
    return NamedLora(pairs, rank, alpha=2 * rank)


def weight_by_path(model: Any, path: str) -> Any:
    """Return the weight of a linear map of the transformers model."""
    return model.get_submodule(path).weight


def num_weights(config: ModelConfig) -> int:
    """Return how many weights our model of this config has, without making it."""
    kind = model_class(config.model_type)
    shapes = nnx.eval_shape(lambda: kind(config))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
