"""The frame of a decoder-only language model; a model file fills in attention, MLP and names."""

import abc
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ForwardBatch, ReadRows
from lora_jax.config import ModelConfig
from lora_jax.kv_cache import KVShape, LayerCache, PagedKVCache
from lora_jax.nn import image_rows, rope
from lora_jax.nn.attention import CosSin
from lora_jax.nn.layers import Embedding, Linear, RMSNorm
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.moe import MoeBlock, own_tables
from lora_jax.nn.remote import RemoteExperts
from lora_jax.nn.vocabulary import own_embeddings, own_logits
from lora_jax.sharding import Split
from lora_jax.typing import Array, Float, Int


@runtime_checkable
class AttentionLike(Protocol):
    """Interface of a decoder layer to attention."""

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        angles: CosSin,
        batch: ForwardBatch,
        cache: LayerCache,
        routing: AdapterRouting,
        read: ReadRows | None = None,
    ) -> tuple[Float[Array, "rows hidden"], LayerCache]: ...


@runtime_checkable
class MlpLike(Protocol):
    """Interface of a decoder layer to an MLP or a mixture of experts."""

    def __call__(
        self, x: Float[Array, "tokens hidden"], routing: AdapterRouting
    ) -> Float[Array, "tokens hidden"]: ...


class DecoderLayer(nnx.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)), of which the caller computes the last sum."""

    def __init__(self, input_norm: Any, attn: AttentionLike, post_norm: Any, mlp: MlpLike):
        self.input_norm, self.attn, self.post_norm, self.mlp = input_norm, attn, post_norm, mlp

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        angles: CosSin,
        batch: ForwardBatch,
        cache: LayerCache,
        routing: AdapterRouting,
        read: ReadRows | None = None,
        addend: Float[Array, "tokens hidden"] | None = None,
    ) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows hidden"], LayerCache]:
        """Return every token's state, or that of the rows `read`, its addend, and the new cache.

        The state after the layer is the sum of the first two; before it, of x and its addend.
        """
        if addend is None:
            normed = self.input_norm.of_rows(x, routing.num_rows)
        else:
            x, normed = self.input_norm.of_sum(x, addend, routing.num_rows)
        out, cache = self.attn(normed, angles, batch, cache, routing, read)
        if read is not None:
            x, routing = x[read.row_to_token], routing.of_read(read)
        x, normed = self.post_norm.of_sum(x, out, routing.num_rows)
        return x, self.mlp(normed, routing), cache


class AbstractCausalLM(nnx.Module):
    """Embedding, layers, final norm, head. Weights only: cache and adapters go in and come out."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        vocab_multiple: int = 1,
    ):
        """Embedding and head have rows of zeros up to a multiple of `vocab_multiple`."""
        rngs, dtype = nnx.Rngs(0) if rngs is None else rngs, jnp.dtype(dtype)
        vocab = -(-config.vocab_size // vocab_multiple) * vocab_multiple
        hidden = config.hidden_size
        self.config = config
        self.module_names = self.catalogue(config).module_names
        self.embed = Embedding(vocab, hidden, dtype=dtype, rngs=rngs)
        layers = [self.make_layer(config, n, dtype, rngs) for n in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = self.make_norm(config, dtype)
        self.lm_head = None if config.tie_embeddings else _head(hidden, vocab, dtype, rngs)

    @staticmethod
    @abc.abstractmethod
    def make_layer(
        config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> DecoderLayer:
        """Return one layer with random weights."""

    @staticmethod
    @abc.abstractmethod
    def catalogue(config: ModelConfig) -> LoraCatalogue:
        """Return what an adapter may change, and how adapter files spell it."""

    @staticmethod
    @abc.abstractmethod
    def weight_rules(config: ModelConfig) -> tuple[Any, ...]:
        """Return, for every parameter, from which tensors of a checkpoint it is made."""

    @staticmethod
    def ignored_weights(config: ModelConfig) -> tuple[str, ...]:
        """Return patterns of a checkpoint's tensors that the model does not compute with."""
        return ()

    @staticmethod
    def make_norm(config: ModelConfig, dtype: jnp.dtype) -> Any:
        """Return the norm before the head."""
        return RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)

    @staticmethod
    def kv_shape(config: ModelConfig) -> KVShape:
        """Return what the cache keeps per token and layer."""
        return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, config.head_dim)

    def __call__(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        adapters: AdapterSlots | None,
        max_rank: int,
        remote: RemoteExperts | None = None,
        split: Split | None = None,
        read: ReadRows | None = None,
    ) -> tuple[Float[Array, "rows hidden"], PagedKVCache]:
        """Return hidden states after the final norm, and the cache with this step's K and V.

        States are those of all tokens, or of the rows `read`: then the last layer computes no more.
        With `remote` the experts' part of the adapters comes from there. With `split` this is one
        device's part of a shard_map: weights, pages and rank rows are its own, results are whole.
        """
        routing = AdapterRouting(
            batch.num_tokens,
            batch.token_to_slot,
            adapters,
            self.module_names,
            max_rank,
            batch.token_to_esft_slot,
            _own_tables(batch, split),
            remote,
            split=split,
        ).with_items()
        routing = routing.without(batch.token_to_surplus_slot).with_own_rows()
        x, angles = self._inputs(batch, routing)
        addend, new_cache, images = None, [], batch.images
        for number, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            last = read if number + 1 == len(self.layers) else None
            args = angles, batch, layer_cache, routing, last
            x, addend, layer_cache = layer(x, *args, addend)
            if images is not None or _sums_experts(layer, split):
                x, addend = x + addend, None
            if images is not None:
                of_rows = images if last is None else image_rows.of_read(images, last)
                x = image_rows.add_after_layer(x, of_rows, number)
            new_cache.append(layer_cache)
        num_rows = batch.num_tokens if read is None else read.num_rows
        if addend is None:
            return self.norm.of_rows(x, num_rows), tuple(new_cache)
        return self.norm.of_sum(x, addend, num_rows)[1], tuple(new_cache)

    def _inputs(
        self, batch: ForwardBatch, routing: AdapterRouting
    ) -> tuple[Float[Array, "tokens hidden"], CosSin]:
        """Return every token's embedding, an image's being its row, and the rope's angles."""
        x, images = self.embed(batch.tokens, routing.split), batch.images
        x = own_embeddings(x, batch.tokens, routing, self.config.vocab_size)
        if images is None:
            return x, rope.cos_sin(self.config.rope, batch.positions)
        angles = rope.cos_sin_of_three(self.config.rope, images.rope_positions)
        return image_rows.embed(x, images), angles

    def logits(
        self,
        hidden: Float[Array, "rows hidden"],
        num_rows: Int[Array, ""],
        row_to_slot: Int[Array, "rows"],
        adapters: AdapterSlots | None,
        max_rank: int,
        split: Split | None = None,
        remote: RemoteExperts | None = None,
    ) -> Float[Array, "rows vocab"]:
        """Return float32 logits of the first num_rows hidden states; other rows are 0."""
        shared = adapters, self.module_names, max_rank
        routing = AdapterRouting(num_rows, row_to_slot, *shared, split=split, remote=remote)
        head = self.embed.attend if self.lm_head is None else self.lm_head
        logits = head(hidden, routing).astype(jnp.float32)
        vocab = self.config.vocab_size
        logits = logits if logits.shape[1] == vocab else logits[:, :vocab]
        return own_logits(logits, hidden, routing)


def _sums_experts(layer: DecoderLayer, split: Split | None) -> bool:
    """Return whether an addition behind a layer costs no launch: XLA fuses it with experts' sum.

    Elsewhere the next norm's kernel adds. An exchange's result is added by nothing else.
    """
    return split is None and isinstance(layer.mlp, MoeBlock)


def _own_tables(
    batch: ForwardBatch, split: Split | None
) -> Int[Array, "moe_layers esft_slots _"] | None:
    """Return the reroute tables, of devices that have whole experts those of their own."""
    if split is None or split.experts == "tp" or batch.reroute_tables is None:
        return batch.reroute_tables
    return own_tables(batch.reroute_tables, split)


def _head(hidden: int, vocab: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> Linear:
    axes = ("vocab", "embed")
    return Linear(hidden, vocab, module="lm_head", layer=0, axes=axes, dtype=dtype, rngs=rngs)
