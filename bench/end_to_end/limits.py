"""The rate that a card's memory and arithmetic allow, from a model's config.

A decode step reads every weight that its rows use once, and the rows' keys and values; a prompt
multiplies by every weight of a token. Routers spread rows over experts evenly: `rows` of them reach
E (1 - (1 - k/E)^rows) of E experts when each takes k.
"""

import dataclasses
from typing import Any

from bench.end_to_end.points import Point

BYTES = 2  # of a bfloat16


@dataclasses.dataclass(frozen=True)
class Card:
    """Limits of a card: a copy's bytes/s (read and written), dense bfloat16 FLOP/s."""

    bytes_per_s: float
    flops_per_s: float


CARDS = {"NVIDIA H200": Card(4.1e12, 790e12), "NVIDIA H100 80GB HBM3": Card(3.0e12, 798e12)}


class Limits:
    """Floors of a model on a card."""

    def __init__(self, config: dict[str, Any], card: Card):
        """`config`: what a config.json says, with Llama's or Qwen3-MoE's names."""
        self._c = config
        self._card = card

    def tokens_per_s(self, point: Point) -> float:
        """Return the most output tokens/s at a point; of a point without answers, input tokens."""
        prompt_s = point.concurrency * point.prompt * self.prompt_token_s(point.prompt)
        if point.answer == 1:
            return point.concurrency * point.prompt / prompt_s
        context = point.prompt + point.answer / 2
        seconds = prompt_s + point.answer * self.step_s(point.concurrency, context)
        return point.concurrency * point.answer / seconds

    def step_s(self, rows: int, context: float) -> float:
        """Return the seconds in which the bytes of a decode step can be read; no adapters."""
        c, experts = self._c, self._experts()
        used = experts * (1 - (1 - self._chosen() / experts) ** rows)
        layer = self._attention() + self._router() + used * self._mlp()
        cached = 2 * c["num_key_value_heads"] * self._head_dim() * context * rows
        elements = c["num_hidden_layers"] * (layer + cached) + self._head()
        return BYTES * elements / self._card.bytes_per_s

    def prompt_token_s(self, prompt: int) -> float:
        """Return the seconds of a prompt token's products, attention over the tokens before it."""
        c = self._c
        layer = self._attention() + self._router() + self._chosen() * self._mlp()
        attention = 2 * c["num_attention_heads"] * self._head_dim() * prompt / 2
        return 2 * c["num_hidden_layers"] * (layer + attention) / self._card.flops_per_s

    def _head_dim(self) -> int:
        c = self._c
        return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]

    def _attention(self) -> int:
        c = self._c
        heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
        return c["hidden_size"] * heads * self._head_dim()

    def _experts(self) -> int:
        return self._c.get("num_experts", 1)

    def _chosen(self) -> int:
        return self._c.get("num_experts_per_tok", 1)

    def _mlp(self) -> int:
        c = self._c
        return 3 * c["hidden_size"] * c.get("moe_intermediate_size", c["intermediate_size"])

    def _router(self) -> int:
        return self._c["hidden_size"] * self._experts() if self._experts() > 1 else 0

    def _head(self) -> int:
        return self._c["hidden_size"] * self._c["vocab_size"]
