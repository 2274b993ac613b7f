"""Each row's own adapter on top of a linear map of the base model."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.nn.remote import Exchange, RemoteExperts
from lora_jax.ops.adapter_items import AdapterItems, adapter_items
from lora_jax.ops.lora_gemm import delta_dtype, lora_gemms
from lora_jax.typing import Array, Float, Int


def apply_lora(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    adapters: AdapterSlots,
    module_index: int,
    layer: int | Int[Array, ""],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"] | None = None,
    *,
    max_rank: int,
    items: AdapterItems | None = None,
) -> Float[Array, "rows d_out"]:
    """y + scaling * (x A^T) B^T of every row's adapter at one site; slot -1 leaves y as it is."""
    owners, options = (row_to_slot, row_to_expert), {"max_rank": max_rank, "items": items}
    return apply_loras([y], x, adapters, [module_index], layer, *owners, **options)[0]


def apply_loras(
    ys: Sequence[Float[Array, "rows d_out"] | None],
    x: Float[Array, "rows d_in"],
    adapters: AdapterSlots,
    module_indices: Sequence[int],
    layer: int | Int[Array, ""],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"] | None = None,
    *,
    max_rank: int,
    items: AdapterItems | None = None,
    width: int | None = None,
) -> tuple[Float[Array, "rows d_out"], ...]:
    """Return apply_lora of several sites of the same x and one width.

    Without ys, what would be added to them, in ops.lora_gemm.delta_dtype; `width` is theirs.
    """
    d_out = ys[0].shape[1] if width is None and ys[0] is not None else width
    if isinstance(layer, int):  # the whole table, so that nothing is cut out of it
        layers = adapters.entries.shape[1]
        tables = (adapters.entries, adapters.scaling)
        entries, scaling = (t.reshape(-1, *t.shape[2:]) for t in tables)
        sites = [i * layers + layer for i in module_indices]
    else:
        entries, scaling = adapters.entries[:, layer], adapters.scaling[:, layer]
        sites = list(module_indices)
    return lora_gemms(
        ys,
        x,
        adapters.pools[str(x.shape[1])],
        adapters.pools[str(d_out)],
        entries,
        scaling,
        sites,
        row_to_slot,
        row_to_expert,
        max_rank=max_rank,
        items=items,
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one flat matrix: how many are real, and which adapter each one uses.

    The fields from `adapters` to `max_rank` are the same for the whole step. Without `adapters` no
    trace of LoRA is in the program, without `reroute_tables` none of ESFT, and without `remote` all
    adapters are on this device. Lives only while a step is traced.
    """

    num_rows: Int[Array, ""]
    row_to_slot: Int[Array, "rows"]
    adapters: AdapterSlots | None
    module_names: tuple[str, ...]  # order of the table's first axis
    max_rank: int
    row_to_esft_slot: Int[Array, "rows"] | None = None
    reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None = None
    remote: RemoteExperts | None = None  # computes a part of every adapter
    items: AdapterItems | None = None  # of these rows, by row_to_slot, if a kernel wants them

    def with_items(self) -> "Rows":
        """Return these rows, brought together by adapter once for all their linear maps."""
        if self.adapters is None:
            return self
        slots = self.adapters.scaling.shape[-1]
        items = adapter_items(self.row_to_slot, slots, max_rank=self.max_rank)
        return dataclasses.replace(self, items=items)

    def add_lora(
        self,
        y: Float[Array, "rows d_out"],
        x: Float[Array, "rows d_in"],
        module: str | None,
        layer: int,
        row_to_expert: Int[Array, "rows"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        """y plus each row's adapter at (module, layer); y itself where no adapter can be."""
        return self.add_loras((y,), x, (module,), layer, row_to_expert)[0]

    def add_loras(
        self,
        ys: Sequence[Float[Array, "rows _"]],
        x: Float[Array, "rows d_in"],
        modules: Sequence[str | None],
        layer: int,
        row_to_expert: Int[Array, "rows"] | None = None,
    ) -> tuple[Float[Array, "rows _"], ...]:
        """Return add_lora of each module; all are maps of the same x. One width is one launch."""
        added = list(ys)
        for width in dict.fromkeys(y.shape[1] for y in ys):
            which = [i for i, y in enumerate(ys) if y.shape[1] == width]
            some = [ys[i] for i in which], x, [modules[i] for i in which]
            for i, y in zip(which, self._applied(*some, width, layer, row_to_expert), strict=True):
                added[i] = y
        return tuple(added)

    @property
    def has_local(self) -> bool:
        """True if adapters may be here of which a part is computed elsewhere for others."""
        return self.remote is None or self.remote.has_local

    def exchange(self, modules: Sequence[str | None], layer: int) -> Exchange | None:
        """Return the exchange of these modules of one x; None where nobody else computes them."""
        names = tuple(module for module in modules if module is not None)
        if self.adapters is None or self.remote is None:
            return None
        if len(names) < len(modules) or not all(self.remote.has(name, layer) for name in names):
            return None
        return self.remote.exchange(names, layer, self.row_to_slot, None, self.num_rows)

    def _applied(self, ys, x, modules, width: int, layer: int, row_to_expert) -> tuple:
        """Return each y, or nothing where there is none, plus what its module adds to it."""
        adapted = [i for i, m in enumerate(modules) if m in self.module_names]
        if self.adapters is None or not adapted:
            return tuple(ys)
        added = apply_loras(
            [ys[i] for i in adapted],
            x,
            self.adapters,
            [self.module_names.index(modules[i]) for i in adapted],
            layer,
            self.row_to_slot,
            row_to_expert,
            max_rank=self.max_rank,
            items=self.items,
            width=width,
        )
        found = dict(zip(adapted, added, strict=True))
        return tuple(found.get(i, y) for i, y in enumerate(ys))

    def deltas(
        self,
        x: Float[Array, "rows d_in"],
        modules: Sequence[str],
        width: int,
        layer: int,
        row_to_expert: Int[Array, "rows"] | None = None,
    ) -> tuple[Float[Array, "rows width"] | None, ...]:
        """Return what each row's adapter adds at these modules, for whoever makes the base's sums.

        Rows without an adapter have 0; None everywhere where no adapter can be. Their dtype is
        ops.lora_gemm.delta_dtype.
        """
        if self.adapters is None or not {*modules} & {*self.module_names}:
            return (None,) * len(modules)
        found = self._applied([None] * len(modules), x, modules, width, layer, row_to_expert)
        zero = jnp.zeros((x.shape[0], width), delta_dtype(x.dtype))
        return tuple(zero if delta is None else delta for delta in found)

    def gathered(
        self,
        row_to_row: Int[Array, "new_rows"],
        num_rows: Int[Array, ""],
        items: AdapterItems | None = None,
    ) -> "Rows":
        """Return the rows of a matrix whose row t is row row_to_row[t] of this one.

        They are those of single experts, past routing, and so have no ESFT slots. `items` are their
        own, if they are known.
        """
        return dataclasses.replace(
            self,
            num_rows=num_rows,
            row_to_slot=self.row_to_slot[row_to_row],
            row_to_esft_slot=None,
            reroute_tables=None,
            items=items,
        )
