"""Linear map, norms, embedding and MLP over a flat list of rows.

Every result of a row depends on that row alone, so that batching, padding and chunking change
nothing. Weights keep torch's orientation [d_out, d_in].
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.nn.gains import add_gains, has_gains
from lora_jax.nn.gather import gather, gather_rows, local_index, pick, swap_rows
from lora_jax.nn.lora import AdapterRouting, add_lora, silu_with_lora
from lora_jax.ops.grouped_matmul import joined_matmul, matmul
from lora_jax.ops.layer_norm import layer_norm
from lora_jax.ops.rms_norm import add_rms_norm, rms_norm
from lora_jax.ops.silu_times import gated_maps, silu_times
from lora_jax.sharding import Split, has_split_inputs
from lora_jax.typing import Array, Float, Int

INIT_STD = 0.02


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jnp.dtype,
    *,
    coded: bool = False,
) -> nnx.Param:
    """Return a random normal weight with its logical axes, from which its sharding follows.

    With `coded` only products read it: a checkpoint's quantised weight may take its place. `rngs`
    without a stream give zeros, for a caller that needs shapes alone: a draw is slow to trace.
    """
    if len(rngs):
        drawn = jax.random.normal(rngs.params(), shape, jnp.float32) * INIT_STD
        value = drawn.astype(dtype)
    else:
        value = jnp.zeros(shape, dtype)
    return nnx.Param(value, logical_axes=axes, coded=coded)


def constant_parameter(
    value: float, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype
) -> nnx.Param:
    """Return a weight that starts as `value` everywhere, with its logical axes."""
    return nnx.Param(jnp.full(shape, value, dtype), logical_axes=axes)


class Linear(nnx.Module):
    """y = W x + b and each row's adapter at the site (module, layer)."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        module: str | None,
        layer: int,
        axes: tuple[str | None, str | None],
        bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.module, self.layer, self.axes = module, layer, axes
        self.weight = parameter(rngs, (d_out, d_in), axes, dtype, coded=True)
        self.bias = constant_parameter(0.0, (d_out,), axes[:1], dtype) if bias else None

    @property
    def gives_whole(self) -> bool:
        """True if the next map needs all outputs, on every device of a split."""
        return self.axes[0] == "vocab" or has_split_inputs(self.axes)

    def __call__(
        self, x: Float[Array, "rows d_in"], routing: AdapterRouting
    ) -> Float[Array, "rows d_out"]:
        split = routing.split
        if split is not None and split.has_whole(self.axes):
            return _apply_whole(self, x, routing, split)
        return apply_linears((self,), x, routing)[0]


def make_linear(layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> Callable[..., Linear]:
    """Return what makes the maps of a layer: (module, d_in, d_out, axes, bias=False) -> Linear."""

    def linear(
        module: str, d_in: int, d_out: int, axes: tuple[str, str], bias: bool = False
    ) -> Linear:
        options = {"module": module, "axes": axes, "bias": bias}
        return Linear(d_in, d_out, **options, layer=layer, dtype=dtype, rngs=rngs)

    return linear


def apply_linears(
    maps: Sequence[Linear], x: Float[Array, "rows d_in"], routing: AdapterRouting
) -> tuple[Float[Array, "rows _"], ...]:
    """Return each map of x: they are of one layer, and share the adapters' launches or exchange.

    In a split the outputs of one map are gathered before another one takes them, and adapters are
    added before that: to the same sums, and with rank rows of the local width.
    """
    pairs = zip(maps, apply_local(maps, x, routing), strict=True)
    return tuple(gather(y, routing.split) if m.gives_whole else y for m, y in pairs)


def apply_local(
    maps: Sequence[Linear], x: Float[Array, "rows d_in"], routing: AdapterRouting
) -> tuple[Float[Array, "rows _"], ...]:
    """Return each map of x, of its outputs those of this device."""
    if has_split_inputs(maps[0].axes):
        x = gather(x, routing.split)
    return _products(maps, x, routing)


def silu_of_linears(
    maps: tuple[Linear, Linear], x: Float[Array, "rows d_in"], routing: AdapterRouting
) -> Float[Array, "rows width"]:
    """Return silu of the first map times the second, of their outputs those of this device.

    With the adapters' part that is one op, except beside a LoRA Server, where a merged adapter is
    taken out of the weights, and where outputs are scaled (nn/gains.py).
    """
    modules, layer = [m.module for m in maps], maps[0].layer
    names = [m for m in modules if m in routing.module_names]
    plain = routing.remote is None and routing.surplus is None and not has_gains(routing, modules)
    if not plain or len(names) < 2 or routing.adapters is None or has_split_inputs(maps[0].axes):
        gate, up = apply_linears(maps, x, routing)
        return silu_times(gate, up, routing.num_rows)
    biases = [None if m.bias is None else m.bias[...] for m in maps]
    ys = joined_matmul(x, [m.weight[...] for m in maps], routing.num_rows, biases)
    return silu_with_lora(ys, x, routing, names, layer)


def _apply_whole(
    linear: Linear, x: Float[Array, "rows part"], routing: AdapterRouting, split: Split
) -> Float[Array, "rows d_out"]:
    """Return a map of the devices' columns of x where each device has the whole weight.

    Many rows are shared: a device gets the columns of its own share alone, which are fewer values
    than all columns of all rows, and the outputs are gathered. Of few rows each device computes
    all outputs, and none are exchanged.
    """
    own = routing.own_rows
    if own is None:
        return _products((linear,), gather(x, split), routing)[0]
    return gather_rows(_products((linear,), swap_rows(x, split), own)[0], split)


def _products(
    maps: Sequence[Linear], x: Float[Array, "rows d_in"], routing: AdapterRouting
) -> tuple[Float[Array, "rows _"], ...]:
    """Return each map of whole rows x, with the adapters' part, of the outputs that lie here."""
    modules, layer = [m.module for m in maps], maps[0].layer
    exchange = routing.exchange(modules, layer)
    if exchange is not None:
        x = exchange.push(x)
    biases = [None if m.bias is None else m.bias[...] for m in maps]
    ys = joined_matmul(x, [m.weight[...] for m in maps], routing.num_rows, biases)
    if exchange is not None:
        ys = exchange.wait_add(ys, x)
        if not routing.has_local:
            return ys
    if routing.surplus is not None:
        ys = add_lora(ys, x, routing.surplus, modules, layer)
    return add_gains(add_lora(ys, x, routing, modules, layer), routing, modules, layer)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype):
        self.eps = eps
        self.weight = constant_parameter(1.0, (size,), (None,), dtype)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Return the norm of every row; differentiable."""
        return rms_norm(x, self.weight[...], self.eps)

    def of_rows(
        self, x: Float[Array, "rows size"], num_rows: Int[Array, ""]
    ) -> Float[Array, "rows size"]:
        """Return the norm of the first num_rows rows; others may be 0."""
        return add_rms_norm(x, None, self.weight[...], self.eps, num_rows=num_rows)[1]

    def of_sum(
        self,
        x: Float[Array, "rows size"],
        addend: Float[Array, "rows size"],
        num_rows: Int[Array, ""],
    ) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
        """Return x + addend and its norm, of the first num_rows rows; others may be 0."""
        return add_rms_norm(x, addend, self.weight[...], self.eps, num_rows=num_rows)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight [+ bias] over the last axis, in float32."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype, bias: bool = False):
        self.eps = eps
        self.weight = constant_parameter(1.0, (size,), (None,), dtype)
        self.bias = constant_parameter(0.0, (size,), (None,), dtype) if bias else None

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.weight[...], bias, self.eps)

    def of_rows(
        self, x: Float[Array, "rows size"], num_rows: Int[Array, ""]
    ) -> Float[Array, "rows size"]:
        """Return the norm of every row."""
        del num_rows
        return self(x)

    def of_sum(
        self,
        x: Float[Array, "rows size"],
        addend: Float[Array, "rows size"],
        num_rows: Int[Array, ""],
    ) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
        """Return x + addend and its norm."""
        del num_rows
        total = x + addend
        return total, self(total)


class Embedding(nnx.Module):
    """Rows of a table by token id; as a head, the same table times the hidden state."""

    def __init__(self, vocab: int, size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = parameter(rngs, (vocab, size), ("vocab", "embed"), dtype)

    def __call__(
        self, tokens: Int[Array, "tokens"], split: Split | None = None
    ) -> Float[Array, "tokens size"]:
        if split is None:
            return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
        owner, local = local_index(tokens, self.weight.shape[0])
        rows = jnp.take(self.weight[...], local, axis=0, mode="clip")
        return pick(rows, jnp.clip(owner, 0, split.size - 1), split)

    def attend(
        self, x: Float[Array, "rows size"], routing: AdapterRouting
    ) -> Float[Array, "rows vocab"]:
        """Return logits of a tied head, with each row's adapter of lm_head."""
        head = ("lm_head",)
        exchange = routing.exchange(head, 0)
        if exchange is not None:
            x = exchange.push(x)
        y = matmul(x, self.weight[...], routing.num_rows)
        if exchange is not None:
            return exchange.wait_add((y,), x)[0]
        ys = add_gains(add_lora((y,), x, routing, head, 0), routing, head, 0)
        return gather(ys[0], routing.split)


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x)); `prefix` tells apart the MLPs of one layer in adapters."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        layer: int,
        prefix: str = "",
        bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = make_linear(layer, dtype=dtype, rngs=rngs)
        self.gate_proj = linear(f"{prefix}gate_proj", hidden, width, ("mlp", "embed"), bias)
        self.up_proj = linear(f"{prefix}up_proj", hidden, width, ("mlp", "embed"), bias)
        self.down_proj = linear(f"{prefix}down_proj", width, hidden, ("embed", "mlp"), bias)

    def __call__(
        self, x: Float[Array, "rows hidden"], routing: AdapterRouting
    ) -> Float[Array, "rows hidden"]:
        return gather(self.local(x, routing), routing.split)

    def local(
        self, x: Float[Array, "rows hidden"], routing: AdapterRouting
    ) -> Float[Array, "rows outputs"]:
        """Return of the MLP's outputs those of this device, for a sum that is gathered."""
        maps = self.gate_proj, self.up_proj
        if routing.adapters is None and all(m.bias is None for m in maps):
            gate, up = (m.weight[...] for m in maps)
            inner = gated_maps(x, gate, up, routing.num_rows)
        else:
            inner = silu_of_linears(maps, x, routing)
        return apply_local((self.down_proj,), inner, routing)[0]
