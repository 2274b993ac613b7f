"""Mixture of experts: router, row map, one grouped matmul per matrix, weighted sum.

Rows (token, expert) are sorted once per layer; base and LoRA rows of one expert stand together, an
ESFT adapter's own experts are further groups behind the base's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.config import ClampedSwiglu, MoeConfig
from lora_jax.nn.gather import (
    gather,
    gather_rows,
    local_index,
    num_own_rows,
    own_rows,
    shares_rows,
    take_owned,
)
from lora_jax.nn.layers import Mlp, constant_parameter, parameter
from lora_jax.nn.lora import AdapterRouting, add_lora, lora_deltas, rows_at
from lora_jax.nn.remote import RemoteExperts
from lora_jax.ops.choose_experts import choose_experts
from lora_jax.ops.grouped_matmul import gated_matmul, grouped_matmul, matmul, plus
from lora_jax.ops.lowered_once import in_layers
from lora_jax.ops.reroute import RowMap, reroute, row_map
from lora_jax.ops.silu_times import silu_of_experts
from lora_jax.ops.take_rows import take_rows
from lora_jax.sharding import AXIS, Split
from lora_jax.typing import Array, Float, Int

# From so many sorted rows on, products ask whether any row has an adapter, and deltas are not made
# zeros where none has. Fewer rows may be a kernel's that reads all addends, and zeros are cheap.
ROWS_OF_ZEROS = 4096


class Router(nnx.Module):
    """Logits of every expert, in float32 whatever the model's dtype."""

    def __init__(self, hidden: int, moe: MoeConfig, layer: int, *, rngs: nnx.Rngs):
        self.layer = layer
        shape, wide = (moe.num_experts, hidden), jnp.dtype(jnp.float32)
        self.weight = parameter(rngs, shape, (None, "embed"), wide)
        self.bias = constant_parameter(0.0, shape[:1], (None,), wide) if moe.bias else None

    def __call__(
        self, x: Float[Array, "tokens hidden"], routing: AdapterRouting
    ) -> Float[Array, "tokens experts"]:
        bias = None if self.bias is None else self.bias[...]
        name = ("router",)
        exchange = routing.exchange(name, self.layer)
        if exchange is not None:
            x = exchange.push(x)
        logits = self._logits(x, routing, bias)

        def added(y: Float[Array, "tokens experts"]) -> Float[Array, "tokens experts"]:
            if exchange is not None:
                return exchange.wait_add((y,), x)[0]
            return add_lora((y,), x, routing, name, self.layer)[0]

        if x.dtype == jnp.float32:
            return added(logits)
        # The slots hold rank rows in the model's dtype: only the adapter's share is rounded to it.
        nothing = jnp.zeros(logits.shape, x.dtype)
        delta = added(nothing)
        return logits if delta is nothing else logits + delta.astype(jnp.float32)

    def _logits(
        self,
        x: Float[Array, "tokens hidden"],
        routing: AdapterRouting,
        bias: Float[Array, "experts"] | None,
    ) -> Float[Array, "tokens experts"]:
        """Return the base's logits; of long prompts each device of a split has some rows."""
        tokens, split, num_rows = x.shape[0], routing.split, routing.num_rows
        if split is None or not shares_rows(tokens, split):
            return matmul(x, self.weight[...], num_rows, bias)
        local, num_local = own_rows(x, split), num_own_rows(num_rows, tokens, split)
        logits = matmul(local, self.weight[...], num_local, bias)
        return gather_rows(logits, split)


class Experts(nnx.Module):
    """One gated MLP per expert; gate and up are [experts, width, hidden], down the other way.

    Room for adapters' experts may follow those of the base (models.expert_tensors).
    """

    def __init__(
        self, hidden: int, moe: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.layer, self.moe = layer, moe
        wide = (moe.num_experts, moe.intermediate_size, hidden)
        back = (moe.num_experts, hidden, moe.intermediate_size)
        self.gate_proj = parameter(rngs, wide, ("experts", "mlp", "embed"), dtype, coded=True)
        self.up_proj = parameter(rngs, wide, ("experts", "mlp", "embed"), dtype, coded=True)
        self.down_proj = parameter(rngs, back, ("experts", "embed", "mlp"), dtype, coded=True)

        def bias(width: int, axis: str) -> nnx.Param | None:
            shape, axes = (moe.num_experts, width), ("experts", axis)
            return constant_parameter(0.0, shape, axes, dtype) if moe.bias else None

        self.gate_bias = bias(moe.intermediate_size, "mlp")
        self.up_bias = bias(moe.intermediate_size, "mlp")
        self.down_bias = bias(hidden, "embed")

    @property
    def num_groups(self) -> int:
        """Experts there are addresses for, the base's and the adapters'."""
        return self.gate_proj.shape[0]

    def __call__(
        self, x: Float[Array, "rows hidden"], map: RowMap, routing: AdapterRouting
    ) -> Float[Array, "rows outputs"]:
        """Return each sorted row's expert output; `routing` is that of the sorted rows.

        Where a split gives a device a part of every expert, it is that part of the outputs.
        """
        if routing.remote is not None:
            return self._with_server(x, map, routing, routing.remote)
        up_names, gate, up = ("gate_proj", "up_proj"), self.gate_proj[...], self.up_proj[...]
        asks = _num_added(x, routing) is not None
        deltas = self._deltas(x, up_names, map, routing, zeros_if_idle=not asks)
        if self.moe.swiglu is None and self.gate_bias is None:
            inner = gated_matmul(x, gate, up, map.group_sizes, *deltas, **self._hints(x, routing))
        else:
            pairs = zip(up_names, deltas, strict=True)
            gate, up = (self._product(x, name, map, routing, delta) for name, delta in pairs)
            inner = self._activation(gate, up, routing)
        if inner.shape[1] < self.down_proj.shape[2]:  # outputs of each expert are split
            inner = gather(inner, routing.split)
        (delta,) = self._deltas(inner, ("down_proj",), map, routing, zeros_if_idle=not asks)
        return self._product(inner, "down_proj", map, routing, delta)

    def _with_server(
        self,
        x: Float[Array, "rows hidden"],
        map: RowMap,
        routing: AdapterRouting,
        server: RemoteExperts,
    ) -> Float[Array, "rows hidden"]:
        """Return the output whose adapters' part a LoRA Server computes while the base's runs.

        The deltas are there too late to be addends of the products; added behind them they give
        the same bits.
        """

        def products(x, *names):
            modules = tuple(f"experts.{name}" for name in names)
            experts = self._experts_of_model(map, routing.split)
            rows = routing.row_to_slot, experts, routing.num_rows
            exchange = server.exchange(modules, self.layer, *rows)
            x = exchange.push(x)
            ys = exchange.wait_add(tuple(self._product(x, name, map, routing) for name in names), x)
            return self._add_local(ys, x, names, map, routing) if server.has_local else ys

        gate, up = products(x, "gate_proj", "up_proj")
        inner = self._activation(gate, up, routing)
        return products(inner, "down_proj")[0]

    def _experts_of_model(self, map: RowMap, split: Split | None) -> Int[Array, "rows"]:
        """Return each row's expert by its number in the model."""
        if split is None:
            return map.row_to_expert
        return map.row_to_expert + jax.lax.axis_index(AXIS) * (self.moe.num_experts // split.size)

    def _add_local(
        self,
        ys: tuple[Float[Array, "rows d_out"], ...],
        x: Float[Array, "rows d_in"],
        names: tuple[str, ...],
        map: RowMap,
        routing: AdapterRouting,
    ) -> tuple[Float[Array, "rows d_out"], ...]:
        """Return ys plus what adapters add whose experts are here while their server is lost."""
        deltas = self._deltas(x, names, map, routing)
        return tuple(y if d is None else plus(y, d) for y, d in zip(ys, deltas, strict=True))

    def _activation(
        self,
        gate: Float[Array, "rows width"],
        up: Float[Array, "rows width"],
        routing: AdapterRouting,
    ) -> Float[Array, "rows width"]:
        if self.moe.swiglu is None:
            return silu_of_experts(gate, up, routing.num_rows)
        return clamped_swiglu(gate, up, self.moe.swiglu)

    def _deltas(
        self,
        x: Float[Array, "rows d_in"],
        names: tuple[str, ...],
        map: RowMap,
        routing: AdapterRouting,
        *,
        zeros_if_idle: bool = True,
    ) -> tuple[Float[Array, "rows d_out"] | None, ...]:
        """Return what the rows' adapters add to the projections of x, or None for each."""
        width = getattr(self, names[0]).shape[1]
        modules = [f"experts.{name}" for name in names]
        of_rows = self.layer, map.row_to_expert
        return lora_deltas(x, routing, modules, width, *of_rows, zeros_if_idle=zeros_if_idle)

    def _product(
        self,
        x: Float[Array, "rows d_in"],
        name: str,
        map: RowMap,
        routing: AdapterRouting,
        addend: Float[Array, "rows d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        bias = getattr(self, name.replace("proj", "bias"))
        bias = None if bias is None else bias[...]
        w = getattr(self, name)[...]
        return grouped_matmul(x, w, map.group_sizes, bias, addend, **self._hints(x, routing))

    def _hints(self, x: Float[Array, "rows _"], routing: AdapterRouting) -> dict:
        """Return what a kernel may know of sorted rows: how many groups they are in, at most where.

        Adapters' experts are few, or take the place of the base's.
        """
        added = _num_added(x, routing)
        return {
            "likely_groups": self.moe.num_experts,
            "num_rows": routing.num_rows,
            "num_added": added,
        }


def _num_added(x: Float[Array, "rows _"], routing: AdapterRouting) -> Int[Array, "1"] | None:
    """Return the number of adapters' items, or None where deltas are zeros if there are none."""
    if routing.items is None or x.shape[0] < ROWS_OF_ZEROS:
        return None
    return routing.items.num_items


def clamped_swiglu(
    gate: Float[Array, "rows width"], up: Float[Array, "rows width"], swiglu: ClampedSwiglu
) -> Float[Array, "rows width"]:
    """(clip(up, ±limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit), rounded once."""
    alpha, limit = jnp.float32(swiglu.alpha), jnp.float32(swiglu.limit)
    wide = jnp.minimum(gate.astype(jnp.float32), limit)
    up_wide = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return ((up_wide + 1) * wide * jax.nn.sigmoid(alpha * wide)).astype(gate.dtype)


class MoeBlock(nnx.Module):
    """Each token's experts, weighted, plus the shared MLP if the model has one."""

    def __init__(
        self, hidden: int, moe: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.moe = moe
        self.router = Router(hidden, moe, layer, rngs=rngs)
        self.experts = Experts(hidden, moe, layer, dtype=dtype, rngs=rngs)
        self.shared_experts = (
            Mlp(
                hidden,
                moe.shared_size,
                layer=layer,
                prefix="shared_experts.",
                dtype=dtype,
                rngs=rngs,
            )
            if moe.shared_size
            else None
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], routing: AdapterRouting
    ) -> Float[Array, "tokens hidden"]:
        weights, ids = choose_experts(self.router(x, routing), self.moe)
        if routing.split is not None and routing.split.experts == "ep":
            y = self._with_own_experts(x, weights, ids, routing)
        else:
            map = self._group(ids, routing)
            num_rows = routing.num_rows * self.moe.top_k
            expert_routing = routing.gathered(map.row_to_token, num_rows, map.items)
            out = self.experts(_rows_of(x, map, expert_routing), map, expert_routing)
            y = combine(rows_at(out, map.inverse), weights)
        if self.shared_experts is not None:
            y = y + self.shared_experts.local(x, routing)
        return gather(y, routing.split)

    def _with_own_experts(
        self,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens k"],
        ids: Int[Array, "tokens k"],
        routing: AdapterRouting,
    ) -> Float[Array, "tokens outputs"]:
        """Return the weighted sum of rows that each device computes for its own experts.

        Rows of other devices' experts are in no group here, and have no adapter. Every device then
        has a part of the columns of every row, and sums a token's in the order of top-k, as one
        device does: it is this device's part of the outputs.
        """
        assert routing.split is not None
        owner, local = local_index(ids, self.moe.num_experts // routing.split.size)
        map = self._group(local, routing)
        num_rows = jnp.sum(map.group_sizes, dtype=jnp.int32)
        expert_routing = routing.gathered(map.row_to_token, num_rows, map.items)
        position = jnp.arange(ids.size, dtype=jnp.int32)
        expert_routing = dataclasses.replace(
            expert_routing,
            row_to_slot=jnp.where(position < num_rows, expert_routing.row_to_slot, -1),
        )
        out = self.experts(_rows_of(x, map, expert_routing), map, expert_routing)
        outputs = take_owned(out, map.inverse, owner.reshape(-1), routing.split)
        return combine(outputs, weights)

    def _group(self, ids: Int[Array, "tokens k"], routing: AdapterRouting) -> RowMap:
        """Bring the (token, expert) rows of every matrix together."""
        groups = self.experts.num_groups
        adapters = routing.items if routing.remote is None else None
        if routing.reroute_tables is None or routing.row_to_esft_slot is None:
            return row_map(ids, routing.num_rows, groups, adapters=adapters)
        table = routing.reroute_tables[self.moe.layers.index(self.experts.layer)]
        slots = routing.row_to_esft_slot
        return reroute(ids, slots, table, routing.num_rows, groups, adapters=adapters)


def _rows_of(
    x: Float[Array, "tokens hidden"], map: RowMap, routing: AdapterRouting
) -> Float[Array, "rows hidden"]:
    """Return the rows of x in the map's order; `routing` is theirs.

    Rows in no group may stay unwritten: of a split, those of other devices' experts.
    """
    return take_rows(x, map.row_to_token, routing.num_rows)


def own_tables(
    tables: Int[Array, "moe_layers esft_slots experts"], split: Split
) -> Int[Array, "moe_layers esft_slots own_experts"]:
    """Return the reroute tables of a device's own experts, in its own indices.

    Indices behind all experts of the base are behind this device's own.
    """
    experts = tables.shape[2]
    num_own = experts // split.size
    first = jax.lax.axis_index(AXIS) * num_own
    local = jax.lax.dynamic_slice_in_dim(tables, first, num_own, axis=2)
    return jnp.where(local < experts, local - first, local - (experts - num_own))


@in_layers
def combine(
    rows: Float[Array, "rows hidden"], weights: Float[Array, "tokens k"]
) -> Float[Array, "tokens hidden"]:
    """y[t] = sum_j weights[t, j] * rows[t * k + j], in float32, in the order of j."""
    tokens, k = weights.shape
    by_token = rows.reshape(tokens, k, -1).astype(jnp.float32)
    total = weights[:, 0, None] * by_token[:, 0]
    for j in range(1, k):
        total = total + weights[:, j, None] * by_token[:, j]
    return total.astype(rows.dtype)
