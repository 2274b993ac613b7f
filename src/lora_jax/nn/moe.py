"""Mixture of experts: router, row map, one grouped matmul per matrix, weighted sum.

Rows (token, expert) are sorted once per layer; base and LoRA rows of one expert stand together, an
ESFT adapter's own experts are further groups behind the base's.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.config import ClampedSwiglu, MoeConfig
from lora_jax.nn.layers import Mlp, constant_parameter, parameter
from lora_jax.nn.lora import Rows
from lora_jax.nn.remote import RemoteExperts
from lora_jax.nn.row_math import kernels, row_sum
from lora_jax.ops import dispatch
from lora_jax.ops.grouped_matmul import gated_matmul, grouped_matmul, matmul, plus, silu_times
from lora_jax.ops.reroute import RowMap, reroute, row_map
from lora_jax.typing import Array, Float, Int


class Router(nnx.Module):
    """Logits of every expert, in float32 whatever the model's dtype."""

    def __init__(self, hidden: int, moe: MoeConfig, layer: int, *, rngs: nnx.Rngs):
        self.layer = layer
        shape, wide = (moe.num_experts, hidden), jnp.dtype(jnp.float32)
        self.weight = parameter(rngs, shape, (None, "embed"), wide)
        self.bias = constant_parameter(0.0, shape[:1], (None,), wide) if moe.bias else None

    def __call__(
        self, x: Float[Array, "tokens hidden"], rows: Rows
    ) -> Float[Array, "tokens experts"]:
        bias = None if self.bias is None else self.bias[...]
        logits = matmul(x.astype(jnp.float32), self.weight[...], rows.num_rows, bias)
        if x.dtype == jnp.float32:
            return rows.add_lora(logits, x, "router", self.layer)
        # The slots hold rank rows in the model's dtype: only the adapter's share is rounded to it.
        nothing = jnp.zeros(logits.shape, x.dtype)
        delta = rows.add_lora(nothing, x, "router", self.layer)
        return logits if delta is nothing else logits + delta.astype(jnp.float32)


def choose_experts(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Return the weights (float32) and ids of each token's experts, best first; differentiable.

    The order of the logits is the order of their softmax, so that top-k needs no softmax.
    """
    allowed = _best_groups_only(logits, moe) if moe.num_groups > 1 else logits
    best, ids = jax.lax.top_k(allowed, moe.top_k)
    highest, _ = jax.lax.top_k(logits, 1)
    weights = jnp.exp(best - highest)
    weights = weights / row_sum(jnp.exp(logits - highest) if moe.softmax_first else weights)
    if moe.topk_norm is not None:
        power = jnp.float32(moe.topk_norm)
        weights = weights / row_sum(weights**power) ** (1 / power)
    return weights * jnp.float32(moe.weight_scale), ids


_CHOICES = kernels("choose_experts", choose_experts)


def _best_groups_only(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> Float[Array, "tokens experts"]:
    """Return logits with -inf outside the groups whose best expert is among the best."""
    grouped = logits.reshape(logits.shape[0], moe.num_groups, -1)
    best_of_group = jax.lax.top_k(grouped, 1)[0][..., 0]
    _, best = jax.lax.top_k(best_of_group, moe.topk_groups)
    groups = jnp.arange(moe.num_groups, dtype=best.dtype)
    chosen = jnp.any(best[:, :, None] == groups[None, None, :], axis=1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(logits.shape)


class Experts(nnx.Module):
    """One gated MLP per expert; gate and up are [experts, width, hidden], down the other way.

    Room for adapters' experts may follow those of the base (nn.expert_tensors).
    """

    def __init__(
        self, hidden: int, moe: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.layer, self.moe = layer, moe
        wide = (moe.num_experts, moe.intermediate_size, hidden)
        back = (moe.num_experts, hidden, moe.intermediate_size)
        self.gate_proj = parameter(rngs, wide, ("experts", "mlp", "embed"), dtype)
        self.up_proj = parameter(rngs, wide, ("experts", "mlp", "embed"), dtype)
        self.down_proj = parameter(rngs, back, ("experts", "embed", "mlp"), dtype)

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
        self, x: Float[Array, "rows hidden"], map: RowMap, rows: Rows
    ) -> Float[Array, "rows hidden"]:
        """Return each sorted row's expert output; `rows` are the sorted rows."""
        if rows.remote is not None:
            return self._with_server(x, map, rows, rows.remote)
        up_names, gate, up = ("gate_proj", "up_proj"), self.gate_proj[...], self.up_proj[...]
        deltas = self._deltas(x, up_names, map, rows)
        if self.moe.swiglu is None and self.gate_bias is None:
            inner = gated_matmul(x, gate, up, map.group_sizes, *deltas, **self._hints(rows))
        else:
            pairs = zip(up_names, deltas, strict=True)
            gate, up = (self._product(x, name, map, rows, delta) for name, delta in pairs)
            inner = self._activation(gate, up)
        (delta,) = self._deltas(inner, ("down_proj",), map, rows)
        return self._product(inner, "down_proj", map, rows, delta)

    def _with_server(
        self, x: Float[Array, "rows hidden"], map: RowMap, rows: Rows, server: RemoteExperts
    ) -> Float[Array, "rows hidden"]:
        """Return the output whose adapters' part a LoRA Server computes while the base's runs.

        The deltas are there too late to be addends of the products; added behind them they give
        the same bits.
        """

        def linears(x, *names):
            modules = tuple(f"experts.{name}" for name in names)
            exchange = server.exchange(
                modules, self.layer, rows.row_to_slot, map.row_to_expert, rows.num_rows
            )
            x = exchange.push(x)
            ys = exchange.wait_add(tuple(self._product(x, name, map, rows) for name in names), x)
            return self._add_local(ys, x, names, map, rows) if server.has_local else ys

        inner = self._activation(*linears(x, "gate_proj", "up_proj"))
        return linears(inner, "down_proj")[0]

    def _add_local(
        self,
        ys: tuple[Float[Array, "rows d_out"], ...],
        x: Float[Array, "rows d_in"],
        names: tuple[str, ...],
        map: RowMap,
        rows: Rows,
    ) -> tuple[Float[Array, "rows d_out"], ...]:
        """Return ys plus what adapters add whose experts are here while their server is lost."""
        deltas = self._deltas(x, names, map, rows)
        return tuple(y if d is None else plus(y, d) for y, d in zip(ys, deltas, strict=True))

    def _activation(
        self, gate: Float[Array, "rows width"], up: Float[Array, "rows width"]
    ) -> Float[Array, "rows width"]:
        if self.moe.swiglu is None:
            return silu_times(gate, up)
        return clamped_swiglu(gate, up, self.moe.swiglu)

    def _deltas(
        self, x: Float[Array, "rows d_in"], names: tuple[str, ...], map: RowMap, rows: Rows
    ) -> tuple[Float[Array, "rows d_out"] | None, ...]:
        """Return what the rows' adapters add to the projections of x, or None for each."""
        width = getattr(self, names[0]).shape[1]
        modules = [f"experts.{name}" for name in names]
        return rows.deltas(x, modules, width, self.layer, map.row_to_expert)

    def _product(
        self,
        x: Float[Array, "rows d_in"],
        name: str,
        map: RowMap,
        rows: Rows,
        addend: Float[Array, "rows d_out"] | None = None,
    ) -> Float[Array, "rows d_out"]:
        bias = getattr(self, name.replace("proj", "bias"))
        bias = None if bias is None else bias[...]
        w = getattr(self, name)[...]
        return grouped_matmul(x, w, map.group_sizes, bias, addend, **self._hints(rows))

    def _hints(self, rows: Rows) -> dict:
        """Return upper bounds for the kernel: number of groups, number of rows.

        Adapters' experts are few, or take the place of the base's.
        """
        return {"likely_groups": self.moe.num_experts, "num_rows": rows.num_rows}


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
        self, x: Float[Array, "tokens hidden"], rows: Rows
    ) -> Float[Array, "tokens hidden"]:
        weights, ids = dispatch.call(_CHOICES, None, self.router(x, rows), self.moe)
        map = self._group(ids, rows)
        expert_rows = rows.gathered(map.row_to_token, rows.num_rows * self.moe.top_k, map.items)
        out = self.experts(x[map.row_to_token], map, expert_rows)
        y = combine(out, weights, map)
        return y if self.shared_experts is None else y + self.shared_experts(x, rows)

    def _group(self, ids: Int[Array, "tokens k"], rows: Rows) -> RowMap:
        """Bring the (token, expert) rows of every matrix together."""
        groups, adapters = self.experts.num_groups, rows.items if rows.remote is None else None
        if rows.reroute_tables is None or rows.row_to_esft_slot is None:
            return row_map(ids, rows.num_rows, groups, adapters=adapters)
        table = rows.reroute_tables[self.moe.layers.index(self.experts.layer)]
        slots = rows.row_to_esft_slot
        return reroute(ids, slots, table, rows.num_rows, groups, adapters=adapters)


def combine(
    out: Float[Array, "rows hidden"], weights: Float[Array, "tokens k"], map: RowMap
) -> Float[Array, "tokens hidden"]:
    """y[t] = sum_j weights[t, j] * out[inverse[t * k + j]], in float32, in the order of j."""
    tokens, k = weights.shape
    by_token = out[map.inverse].reshape(tokens, k, -1).astype(jnp.float32)
    total = weights[:, 0, None] * by_token[:, 0]
    for j in range(1, k):
        total = total + weights[:, j, None] * by_token[:, j]
    return total.astype(out.dtype)
