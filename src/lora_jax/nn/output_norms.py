"""Norms of a model's adapted outputs, which turn an adapter's DoRA and biases into rank rows.

    ||W + s B A||^2 = ||W||^2 + 2 s B . (A W^T)^T + s^2 B (A A^T) B^T, row by row

so that nothing of the size of W is made beside it. Weights in 8 or 4 bits count as what they stand
for.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters import gains
from lora_jax.adapters.weights import AdapterWeights, SiteWeights
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.layers import Embedding, Linear
from lora_jax.ops.grouped_matmul.weights import plain
from lora_jax.typing import Array, Float

_HEAD = "lm_head"
_HIGHEST = jax.lax.Precision.HIGHEST


class OutputNorms:
    """The linear maps of one model whose outputs adapters may scale; any thread may use it."""

    def __init__(self, model: AbstractCausalLM, max_rank: int):
        """`max_rank` bounds the adapters' ranks."""
        self._max_rank = max_rank
        self._maps: dict[tuple[str, int], Linear | Embedding] = {
            (module.module, module.layer): module
            for _, module in nnx.iter_modules(model)
            if isinstance(module, Linear) and module.module is not None
        }
        if model.lm_head is None:
            self._maps[_HEAD, 0] = model.embed

    @property
    def modules(self) -> frozenset[str]:
        """Names of the modules."""
        return frozenset(module for module, _ in self._maps)

    def warm_up(self) -> None:
        """Compile what `resolve` runs, one program for each shape of a map."""
        seen = set()
        for module in self._maps.values():
            weight = module.weight[...]
            kind = weight.shape, jax.tree.structure(weight)
            if kind not in seen:
                seen.add(kind)
                self._norms(weight, np.zeros((1, weight.shape[1])), np.zeros((1, weight.shape[0])))

    def resolve(self, weights: AdapterWeights) -> AdapterWeights:
        """Return the adapter with its gains as sites; itself if it has none.

        Raises ValueError naming where a gain does not fit the base.
        """
        made: dict[tuple[str, int], SiteWeights] = {}
        for site, raw in weights.gains.items():
            where, maps = f"{site[0]} of layer {site[1]}", self._maps[site]
            bias = None if isinstance(maps, Embedding) or maps.bias is None else maps.bias[...]
            bias = None if bias is None else np.asarray(bias, np.float32)
            norm = None
            if raw.magnitude is not None:
                lora = weights.sites[site]
                a, b = (np.asarray(m[0], np.float32) for m in (lora.a, lora.b))
                norm = self._norms(maps.weight[...], a, b * np.float32(lora.scaling))
            made[site] = gains.gain_site(raw, norm, bias, where)
        return gains.resolved(weights, made) if made else weights

    def _norms(self, weight: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the norm of each row of W + b^T a, of a [rank, d_in] and b [rank, d_out]."""
        d_out = b.shape[1]
        padded = (np.zeros((self._max_rank, width), np.float32) for width in reversed(weight.shape))
        for rows, given in zip(made := list(padded), (a, b), strict=True):
            rows[: len(given), : given.shape[1]] = given
        return np.asarray(_row_norms(weight, *made))[:d_out]


@jax.jit
def _row_norms(
    weight: Any, a: Float[Array, "rank d_in"], b: Float[Array, "rank d_out"]
) -> Float[Array, "d_out"]:
    """Return sqrt(sum_i (W + b^T a)[o, i]^2), in float32."""
    wide = plain(weight).astype(jnp.float32)
    by_rank = jnp.einsum("oi,ri->ro", wide, a, precision=_HIGHEST)
    squares = jnp.einsum("ri,si->rs", a, a, precision=_HIGHEST)
    squared = jnp.sum(b * jnp.einsum("rs,so->ro", squares, b, precision=_HIGHEST), axis=0)
    total = jnp.sum(wide * wide, axis=1) + 2 * jnp.sum(b * by_rank, axis=0) + squared
    return jnp.sqrt(jnp.maximum(total, 0))
