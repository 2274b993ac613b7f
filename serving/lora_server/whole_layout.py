"""Sites of one process that holds every adapter of an engine whole: `isolation=server` on GPUs.

The process is a LoRA Server of one rank. Its sites are the linear maps of a layer, as many as the
kernels of a device take; other modules are changed by no adapter of such an engine.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from lora_jax.ops.lora_gemm import delta_dtype
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.spec import base_digest
from serving.lora_server.tenant_layout import TenantLayout
from serving.lora_server.transport.compatibility import Terms

_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("experts.gate_proj", "experts.up_proj", "experts.down_proj"),
)
MOST_SITES = 4  # src/cuda_backend/csrc/peer/state.cuh


@dataclasses.dataclass(frozen=True)
class WholeShard:
    """The part of the only rank: all of it."""

    layers: tuple[int, ...]
    num_experts: int  # 1: there are none
    sites: dict[int, tuple[str, ...]]
    rank = first_expert = 0

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that it computes."""
        return tuple(name for names in self.sites.values() for name in names)

    @property
    def expert_slice(self) -> slice:
        """Its experts among all of the model."""
        return slice(0, self.num_experts)

    def catalogue(self, catalogue: LoraCatalogue) -> LoraCatalogue:
        """Return the catalogue of these modules."""
        return catalogue.only(self.modules)


class WholeLayout:
    """Sites, terms and shard of such a process, for one base model."""

    def __init__(self, model: str):
        """Read the model's config, no weights. Raises ValueError for a model that has no such
        sites, or too many.
        """
        self.model, self.config = model, read_config(Path(model))
        config = self.config
        self.catalogue = model_class(config.model_type).catalogue(config)
        self._inner = TenantLayout(self.catalogue.only(_MODULES))
        self.sites, self.num_layers = self._inner.sites, self._inner.num_layers
        self.num_experts = 1 if config.moe is None else config.moe.num_experts
        self.top_k = 1 if config.moe is None else config.moe.top_k
        if not 1 <= len(self.sites) <= MOST_SITES:
            raise ValueError(
                f"{config.model_type} has {len(self.sites)} sites of linear maps in its layers, "
                f"and one process for all adapters computes 1 to {MOST_SITES}: use isolation "
                "'process'."
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of messages, as the model numbers them."""
        return tuple(range(self.num_layers))

    @property
    def shard(self) -> WholeShard:
        """Part of an adapter that the process holds: whatever it may change."""
        return WholeShard(self.layers, self.num_experts, dict(enumerate(self.sites)))

    def site(self, modules: tuple[str, ...]) -> int:
        """Return the number of the site of these modules. Raises ValueError: there is none."""
        return self._inner.site(modules)

    def has(self, module: str, layer: int) -> bool:
        """True if the process computes this module of the layer."""
        return self._inner.has(module, layer)

    def mask(self, names: Iterable[str]) -> int:
        """Return the sites of these modules as bits: others of an adapter get no message."""
        return self._inner.mask(list(names))

    def check(self, name: str, modules: Iterable[str]) -> None:
        """Raise ValueError where an adapter changes a module without a site."""
        missing = sorted(set(modules) - {n for site in self.sites for n in site})
        if missing:
            allowed = ", ".join(n for site in self.sites for n in site)
            raise ValueError(
                f"{name} changes {', '.join(missing)}, which one process for all adapters does "
                f"not compute: it computes {allowed}. Use isolation 'process'."
            )

    def terms(self, max_rows: int, dtype: str, adapters: int) -> Terms:
        """Return what engine and process must agree on. `max_rows` are those of a message."""
        deltas = delta_dtype(jnp.dtype(dtype)).name
        shapes = self._inner.shapes(max_rows, dtype, deltas)
        placement = ServerLayout(AdapterShape(adapters, self.num_layers, self.num_experts, 1))
        return Terms(base_digest(self.model), placement, shapes)
