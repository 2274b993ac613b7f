"""Sites of a tenant's exchanges: one for every module that adapters may change. No jax.

Maps of one x are one exchange, as the layers ask for them (nn.layers.apply_linears, nn.moe).
"""

from collections.abc import Sequence

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.weights import AdapterReport
from serving.lora_server.transport.shapes import Shapes, Site

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("experts.gate_proj", "experts.up_proj"),
    ("shared_experts.gate_proj", "shared_experts.up_proj"),
)
MOST_SITES = 20  # and their mask beside a seat's number in 31 bits


class TenantLayout:
    """Sites of one base model, all of them computed by tenants."""

    def __init__(self, catalogue: LoraCatalogue):
        """Raises ValueError for a model whose adapters tenants cannot compute."""
        modules = catalogue.modules
        if catalogue.kv_b_heads is not None:
            raise ValueError(
                f"Adapters of {catalogue.model_type} change absorbed attention, which isolation "
                "'server' does not compute: use isolation 'process'."
            )
        sites: dict[tuple[str, ...], int] = {}
        for name in modules:
            group = next((g for g in _TOGETHER if name in g and set(g) <= set(modules)), (name,))
            sites.setdefault(group, len(sites))
        if len(sites) > MOST_SITES:
            raise ValueError(f"{catalogue.model_type} has {len(sites)} sites, not {MOST_SITES}.")
        self.sites, self.num_layers = tuple(sites), catalogue.num_layers
        self._number, self._modules = sites, modules

    def site(self, modules: tuple[str, ...]) -> int:
        """Return the number of the site of these modules. Raises ValueError: there is none."""
        if modules not in self._number:
            raise ValueError(
                f"A layer applies {', '.join(modules)} to one x, for which isolation 'server' has "
                "no exchange: use isolation 'process'."
            )
        return self._number[modules]

    def has(self, module: str, layer: int) -> bool:
        """True if tenants compute this module of the layer: all that adapters may have."""
        layers = self._modules.get(module)
        return layers is not None and layer in layers.layers

    def has_any(self, report: AdapterReport) -> bool:
        """True if tenants compute a part of an adapter: always."""
        return bool(report.modules)

    def mask(self, names: Sequence[str]) -> int:
        """Return the sites of these modules as bits: others of an adapter get no message."""
        return sum(1 << i for i, site in enumerate(self.sites) if set(site) & set(names))

    def module(self, name: str) -> LoraModule:
        """Return the catalogue's module."""
        return self._modules[name]

    def shapes(self, max_rows: int, dtype: str, delta_dtype: str = "float32") -> Shapes:
        """Return the shapes of a channel for messages of so many rows.

        A tenant's results are float32, rounded once where they are added.
        """
        sites = []
        for group in self.sites:
            maps = [self._modules[name] for name in group]
            sites.append(Site(" ".join(group), maps[0].d_in, tuple(m.d_out for m in maps)))
        return Shapes(self.num_layers, max_rows, dtype, delta_dtype, tuple(sites))
