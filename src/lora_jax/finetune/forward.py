"""A differentiable forward pass over whole rows of text, on the modules of the served model.

Serving runs C++ kernels over pages, which have no gradient. Here the same nnx modules, with the
same weights and the same routing, run as dense einsums: attention over the row, every expert on
every token. Logits equal the served ones up to the order of float32 sums.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.batch import ImageRows
from lora_jax.finetune.attention import attend, linear, product
from lora_jax.finetune.lora_params import LoraDelta
from lora_jax.nn import image_rows, rope
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.layers import Mlp
from lora_jax.nn.moe import Experts, MoeBlock, Router, clamped_swiglu
from lora_jax.ops.choose_experts import choose_experts
from lora_jax.ops.grouped_matmul import silu_times
from lora_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """Experts of each token of one layer, best first, and their weights."""

    ids: Int[Array, "tokens k"]
    weights: Float[Array, "tokens k"]
    imbalance: Float[Array, ""]  # 1 is even use


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Logits of every place, and the routing of each layer that has experts, by its number."""

    logits: Float[Array, "rows length vocab"]
    routed: dict[int, Routed]

    @property
    def imbalance(self) -> Float[Array, ""]:
        """Mean imbalance of the experts' use (1 is even; 0: no experts)."""
        total = sum((layer.imbalance for layer in self.routed.values()), jnp.float32(0))
        return total / max(len(self.routed), 1)


def forward(
    model: AbstractCausalLM,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    segments: Int[Array, "rows length"],
    lora: LoraDelta | None = None,
    images: ImageRows | None = None,
) -> Output:
    """Return float32 logits; a place sees the places before it that are in its own segment.

    Rows of `images`, if there are any, stand at their places as they do where it is served.

    Raises ValueError naming a kind of attention or MLP that this pass does not do.
    """
    x, routed = states(model, tokens, positions, segments, lora, images)
    logits = head(model, x, lora).reshape(*tokens.shape, -1)
    return Output(logits.astype(jnp.float32), routed)


def states(
    model: AbstractCausalLM,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    segments: Int[Array, "rows length"],
    lora: LoraDelta | None = None,
    images: ImageRows | None = None,
) -> tuple[Float[Array, "places hidden"], dict[int, Routed]]:
    """Return the state of every place after the final norm, rows one after the other, and routing.

    What `forward` computes the logits of; raises what it raises.
    """
    length = tokens.shape[1]
    if images is None:
        angles = rope.cos_sin(model.config.rope, positions.reshape(-1))
    else:
        angles = rope.cos_sin_of_three(model.config.rope, images.rope_positions)
    earlier = jnp.tril(jnp.ones((length, length), bool))[None]
    same = segments[:, :, None] == segments[:, None, :]
    x = model.embed(tokens.reshape(-1))
    x = x if images is None else image_rows.embed(x, images)
    routed: dict[int, Routed] = {}
    for number, layer in enumerate(model.layers):
        x = x + attend(layer.attn, layer.input_norm(x), angles, earlier & same, lora)
        normed = layer.post_norm(x)
        if isinstance(layer.mlp, MoeBlock):
            out, routed[number] = mixture(layer.mlp, normed, lora)
        elif isinstance(layer.mlp, Mlp):
            out = gated_mlp(layer.mlp, normed, lora)
        else:
            raise ValueError(f"training does not support {type(layer.mlp).__name__}")
        x = x + out
        x = x if images is None else image_rows.add_after_layer(x, images, number)
    return model.norm(x), routed


def head(
    model: AbstractCausalLM, x: Float[Array, "tokens hidden"], lora: LoraDelta | None
) -> Float[Array, "tokens vocab"]:
    """Return the logits of a tied or a separate head."""
    if model.lm_head is not None:
        return linear(model.lm_head, x, lora)
    y = jnp.einsum("ti,oi->to", x, model.embed.weight[...])
    delta = lora.dense(x, "lm_head", 0) if lora else None
    return y if delta is None else y + delta


def gated_mlp(
    mlp: Mlp, x: Float[Array, "tokens hidden"], lora: LoraDelta | None
) -> Float[Array, "tokens hidden"]:
    """down(silu(gate(x)) * up(x)) with what is trained at its three sites."""
    inner = silu_times(linear(mlp.gate_proj, x, lora), linear(mlp.up_proj, x, lora))
    return linear(mlp.down_proj, inner, lora)


def mixture(
    block: MoeBlock, x: Float[Array, "tokens hidden"], lora: LoraDelta | None
) -> tuple[Float[Array, "tokens hidden"], Routed]:
    """Return sum_e gate[t, e] * expert_e(x[t]), and the routing with E * sum_e load_e * mean_e.

    gate is 0 for experts that are not among the token's top k; load is the share of choices and
    mean the mean probability of each expert (Switch Transformer's balancing loss).
    """
    scores = router_logits(block.router, x, lora)
    weights, ids = choose_experts(scores, block.moe, implementation="xla")
    chosen = jax.nn.one_hot(ids, block.moe.num_experts, dtype=jnp.float32)
    gates = jnp.einsum("tk,tke->te", weights, chosen)
    load = jnp.mean(chosen, axis=(0, 1))
    mean = jnp.mean(jax.nn.softmax(scores, axis=-1), axis=0)
    imbalance = block.moe.num_experts * jnp.sum(load * mean)
    out = gated_experts(block.experts, x, gates.astype(x.dtype), lora)
    if block.shared_experts is not None:
        out = out + gated_mlp(block.shared_experts, x, lora)
    return out, Routed(ids, weights, imbalance)


def router_logits(
    router: Router, x: Float[Array, "tokens hidden"], lora: LoraDelta | None
) -> Float[Array, "tokens experts"]:
    """Return the router's float32 logits."""
    wide = x.astype(jnp.float32)
    y = jnp.einsum("ti,oi->to", wide, router.weight[...])
    if router.bias is not None:
        y = y + router.bias[...][None]
    delta = lora.dense(wide, "router", router.layer) if lora else None
    return y if delta is None else y + delta


def gated_experts(
    experts: Experts,
    x: Float[Array, "tokens hidden"],
    gates: Float[Array, "tokens experts"],
    lora: LoraDelta | None,
) -> Float[Array, "tokens hidden"]:
    """Return sum_e gates[t, e] * expert_e(x[t]): every expert is computed for every token."""

    def widened(name: str) -> Float[Array, "tokens experts width"]:
        weight, bias = getattr(experts, f"{name}_proj"), getattr(experts, f"{name}_bias")
        y = product("ti,eoi->teo", x, weight[...])
        if bias is not None:
            y = y + bias[...][None]
        site = (f"experts.{name}_proj", experts.layer, experts.moe.num_experts)
        delta = lora.each_expert(x, *site) if lora else None
        return y if delta is None else y + delta

    gate, up = widened("gate"), widened("up")
    flat, swiglu = (-1, gate.shape[-1]), experts.moe.swiglu
    if swiglu is None:
        inner = silu_times(gate.reshape(flat), up.reshape(flat))
    else:
        inner = clamped_swiglu(gate.reshape(flat), up.reshape(flat), swiglu)
    inner = inner.reshape(gate.shape) * gates[:, :, None]
    y = product("tei,eoi->to", inner, experts.down_proj[...])
    if experts.down_bias is not None:
        y = y + jnp.einsum("te,eo->to", gates, experts.down_bias[...])
    delta = lora.sum_of_experts(inner, "experts.down_proj", experts.layer) if lora else None
    return y if delta is None else y + delta
