"""Routing statistics of a text, from the dense pass that training uses."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from lora_jax.finetune.documents import Document
from lora_jax.finetune.esft_scores import RoutingTotals
from lora_jax.finetune.forward import Routed, forward
from lora_jax.finetune.packing import Rows, pack
from lora_jax.finetune.perplexity import BATCH_ROWS, padded
from lora_jax.nn.decoder import AbstractCausalLM

MOST_TOKENS = 32 * 4096  # plenty for means over some hundred experts


def collect_routing(
    model: AbstractCausalLM,
    documents: Sequence[Document],
    length: int,
    most_tokens: int = MOST_TOKENS,
) -> dict[int, RoutingTotals]:
    """Return, per layer with experts, the gates and choices of the first documents' tokens.

    Documents are taken in their order until they hold `most_tokens`. Raises ValueError when the
    model has no experts.
    """
    graphdef, state = nnx.split(model, graph=False)

    @jax.jit
    def route(state: Any, batch: Rows) -> dict[int, Routed]:
        merged = nnx.merge(graphdef, state)
        return forward(merged, batch.tokens, batch.positions, batch.segments).routed

    moe = model.config.moe
    if moe is None:
        raise ValueError(f"{model.config.model_type} has no experts to select")
    rows = pack(first_tokens(documents, most_tokens), length)
    totals: dict[int, RoutingTotals] = {}
    for start in tqdm(range(0, rows.num_rows, BATCH_ROWS), desc="routing"):
        batch = padded(rows, start)
        count = min(BATCH_ROWS, rows.num_rows - start)
        real = (np.asarray(batch.segments)[:count] >= 0).reshape(-1)
        for layer, routed in route(state, batch).items():
            ids, gates = np.asarray(routed.ids), np.asarray(routed.weights)
            total = totals.setdefault(layer, RoutingTotals(moe.num_experts))
            # The factor that a model puts on all its gates says nothing about an expert.
            kept = gates[: len(real)][real] / np.float32(moe.weight_scale)
            total.add(ids[: len(real)][real], kept)
    return totals


def first_tokens(documents: Sequence[Document], most_tokens: int) -> list[Document]:
    """Return documents in their order until they hold `most_tokens` tokens."""
    taken, tokens = [], 0
    for document in documents:
        if tokens >= most_tokens:
            break
        taken.append(document)
        tokens += len(document.tokens)
    return taken
