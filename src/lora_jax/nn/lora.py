"""Each row's own adapter on top of a linear map of the base model.

`Linear.__call__` (nn.layers) calls `add_lora`, which calls the op (ops.lora_gemm), which calls the
kernel that serves this platform. Experts ask for `lora_deltas`, which their matmul adds itself.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ReadRows
from lora_jax.nn.gather import num_own_rows, own_rows, shares_rows
from lora_jax.nn.remote import Exchange, RemoteExperts
from lora_jax.ops.adapter_items import AdapterItems, adapter_items
from lora_jax.ops.joined_lora import joined_lora
from lora_jax.ops.lora_gemm import delta_dtype, lora_gemms
from lora_jax.ops.lora_silu import lora_silu_times
from lora_jax.ops.lowered_once import in_layers
from lora_jax.sharding import Split
from lora_jax.typing import Array, Float, Int, Num


@in_layers
def rows_at(values: Num[Array, "rows *_"], row_to_row: Int[Array, "new_rows"]) -> Array:
    """Return the matrix whose row t is row row_to_row[t] of `values`."""
    return values[row_to_row]


@dataclasses.dataclass(frozen=True)
class AdapterRouting:
    """Adapter of each row of a flat matrix, and the number of its real rows.

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
    split: Split | None = None  # of the model over several devices; pools have its local widths
    surplus: "AdapterRouting | None" = None  # what is taken out of dense maps; see `without`
    own_rows: "AdapterRouting | None" = None  # of a device's share; see `with_own_rows`

    def with_items(self) -> "AdapterRouting":
        """Return this routing, its rows brought together by adapter once for all linear maps."""
        if self.adapters is None:
            return self
        slots = self.adapters.scaling.shape[-1]
        items = adapter_items(self.row_to_slot, slots, max_rank=self.max_rank)
        return dataclasses.replace(self, items=items)

    def without(self, row_to_slot: Int[Array, "rows"] | None) -> "AdapterRouting":
        """Return this routing for dense maps whose weights have each row's `row_to_slot` too much.

        That adapter's part is subtracted before the row's own is added: V-LoRA's deLoRA branch
        (section 4.4.2). None: no weights have anything too much.
        """
        if row_to_slot is None or self.adapters is None:
            return self
        negated = dataclasses.replace(self.adapters, scaling=-self.adapters.scaling)
        surplus = dataclasses.replace(self, adapters=negated, row_to_slot=row_to_slot)
        return dataclasses.replace(self, surplus=surplus.with_items())

    def with_own_rows(self) -> "AdapterRouting":
        """Return this routing with that of this device's share of the rows.

        Maps that lie whole on every device of a split multiply that share alone. It is None for few
        rows, and where no map lies whole.
        """
        split, rows = self.split, self.row_to_slot.shape[0]
        if split is None or split.attention_output != "whole" or not shares_rows(rows, split):
            return self
        return dataclasses.replace(self, own_rows=self._share(split))

    def _share(self, split: Split) -> "AdapterRouting":
        """Return the routing of this device's share of the rows, for dense maps."""
        return dataclasses.replace(
            self,
            num_rows=num_own_rows(self.num_rows, self.row_to_slot.shape[0], split),
            row_to_slot=own_rows(self.row_to_slot, split),
            row_to_esft_slot=None,
            reroute_tables=None,
            items=None,
            surplus=None if self.surplus is None else self.surplus._share(split),
        ).with_items()

    @property
    def brings(self) -> bool:
        """True if some rows' adapters may have more than LoRA."""
        return self.adapters is not None and self.adapters.token_ids is not None

    @property
    def has_local(self) -> bool:
        """True if some adapters are on this device although a server computes those of others."""
        return self.remote is None or self.remote.has_local

    def exchange(self, modules: Sequence[str | None], layer: int) -> Exchange | None:
        """Return the exchange of these modules of one x; None where no server computes them."""
        names = tuple(module for module in modules if module is not None)
        if self.adapters is None or self.remote is None:
            return None
        if len(names) < len(modules) or not all(self.remote.has(name, layer) for name in names):
            return None
        return self.remote.exchange(names, layer, self.row_to_slot, None, self.num_rows)

    def gathered(
        self,
        row_to_row: Int[Array, "new_rows"],
        num_rows: Int[Array, ""],
        items: AdapterItems | None = None,
    ) -> "AdapterRouting":
        """Return the routing of a matrix whose row t is row row_to_row[t] of this one.

        Its rows are those of single experts, past routing, and so have no ESFT slots, and nothing
        too much: experts are not merged. `items` are their own, if they are known.
        """
        return dataclasses.replace(
            self,
            num_rows=num_rows,
            row_to_slot=rows_at(self.row_to_slot, row_to_row),
            row_to_esft_slot=None,
            reroute_tables=None,
            items=items,
            surplus=None,
            own_rows=None,
        )

    def of_read(self, read: ReadRows) -> "AdapterRouting":
        """Return the routing of the rows that are read; padding rows have no adapter."""
        rows = read.row_to_token
        is_real = jnp.arange(rows.shape[0], dtype=jnp.int32) < read.num_rows

        def at(values: Int[Array, "rows"]) -> Int[Array, "read"]:
            return jnp.where(is_real, values[rows], -1)

        return dataclasses.replace(
            self,
            num_rows=read.num_rows,
            row_to_slot=at(self.row_to_slot),
            row_to_esft_slot=None if self.row_to_esft_slot is None else at(self.row_to_esft_slot),
            items=None,
            surplus=None if self.surplus is None else self.surplus.of_read(read),
            own_rows=None,
        ).with_items()

    def lora_arguments(self, modules: Sequence[str], layer: int, d_in: int, d_out: int) -> dict:
        """Return what ops.lora_gemms takes besides rows: pools, tables and the modules' sites.

        The tables come whole, so that nothing is cut out of them.
        """
        assert self.adapters is not None
        tables = (self.adapters.entries, self.adapters.scaling)
        entries, scaling = (t.reshape(-1, *t.shape[2:]) for t in tables)
        layers = self.adapters.entries.shape[1]
        return {
            "a_pool": self.adapters.pools[str(d_in)],
            "b_pool": self.adapters.pools[str(d_out)],
            "entries": entries,
            "scaling": scaling,
            "sites": [self.module_names.index(m) * layers + layer for m in modules],
            "row_to_slot": self.row_to_slot,
            "max_rank": self.max_rank,
            "items": self.items,
        }


def add_lora(
    ys: Sequence[Float[Array, "rows _"]],
    x: Float[Array, "rows d_in"],
    routing: AdapterRouting,
    modules: Sequence[str | None],
    layer: int,
    row_to_expert: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return each y plus scaling * (x A^T) B^T of every row's adapter at its (module, layer).

    All are maps of the same x; one width is one launch, and so are few rows of several widths. A y
    whose module no adapter can have comes back itself, as do rows of slot -1, bit for bit.
    """
    added: list[Any] = list(ys)
    if routing.adapters is None:
        return tuple(added)
    adapted = [i for i, m in enumerate(modules) if m in routing.module_names]
    widths = dict.fromkeys(ys[i].shape[1] for i in adapted)
    if len(widths) > 1 and row_to_expert is None:
        groups = [adapted]
    else:
        groups = [[i for i in adapted if ys[i].shape[1] == width] for width in widths]
    for group in groups:
        names = [m for i in group if (m := modules[i]) is not None]
        given = [ys[i] for i in group]
        done = _added(given, x, routing, names, layer, row_to_expert)
        for i, y in zip(group, done, strict=True):
            added[i] = y
    return tuple(added)


def _added(
    ys: Sequence[Float[Array, "rows _"]],
    x: Float[Array, "rows d_in"],
    routing: AdapterRouting,
    modules: Sequence[str],
    layer: int,
    row_to_expert: Int[Array, "rows"] | None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return what `add_lora` does of maps that an adapter may have; experts' have one width."""
    arguments = routing.lora_arguments(modules, layer, x.shape[1], ys[0].shape[1])
    if len({y.shape[1] for y in ys}) == 1:
        return lora_gemms(ys, x, row_to_expert=row_to_expert, **arguments)
    assert routing.adapters is not None
    del arguments["b_pool"]
    pools = [routing.adapters.pools[str(y.shape[1])] for y in ys]
    return joined_lora(ys, x, b_pools=pools, **arguments)


def silu_with_lora(
    ys: Sequence[Float[Array, "rows width"]],
    x: Float[Array, "rows d_in"],
    routing: AdapterRouting,
    modules: Sequence[str],
    layer: int,
) -> Float[Array, "rows width"]:
    """Return silu of the first y times the second, each with what `add_lora` adds to it.

    Adapters may be at both modules.
    """
    gate, up = ys
    arguments = routing.lora_arguments(modules, layer, x.shape[1], gate.shape[1])
    return lora_silu_times(gate, up, routing.num_rows, x, **arguments)


def lora_deltas(
    x: Float[Array, "rows d_in"],
    routing: AdapterRouting,
    modules: Sequence[str],
    width: int,
    layer: int,
    row_to_expert: Int[Array, "rows"] | None = None,
    *,
    zeros_if_idle: bool = True,
) -> tuple[Float[Array, "rows width"] | None, ...]:
    """Return what each row's adapter adds at these modules, for a matmul that adds it itself.

    Rows without an adapter have 0; None everywhere where no adapter can be. Their dtype is
    ops.lora_gemm.delta_dtype. `zeros_if_idle` is that of ops.lora_gemm.lora_gemms.
    """
    names = [module for module in modules if module in routing.module_names]
    if routing.adapters is None or not names:
        return (None,) * len(modules)
    arguments = routing.lora_arguments(names, layer, x.shape[1], width)
    arguments |= {"row_to_expert": row_to_expert, "zeros_if_idle": zeros_if_idle}
    done = lora_gemms([None] * len(names), x, **arguments)
    deltas = dict(zip(names, done, strict=True))
    zero = jnp.zeros((x.shape[0], width), delta_dtype(x.dtype))
    return tuple(deltas.get(module, zero) for module in modules)
