"""Kernels called with their arguments one by one, as cases of tests list them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lora_jax.ops.lora_gemm import LoraBatch
from lora_jax.ops.paged_attention import PagedAttentionArgs

_OF_ATTENTION = {field.name for field in dataclasses.fields(PagedAttentionArgs)}


def lora_kernel(kernel: Callable) -> Callable[..., Any]:
    """Return kernel(y, batch) as a function of y and the batch's parts, the largest rank last."""

    def call(y, *parts, max_rank=None, items=None, **options):
        rank = () if max_rank is None else (max_rank,)
        batch = LoraBatch(*parts, *rank)
        if items is not None:
            batch = dataclasses.replace(batch, items=items)
        return kernel(y, batch, **options)

    return call


def attention_kernel(kernel: Callable) -> Callable[..., Any]:
    """Return kernel(args) as a function of what args holds, by place or by name."""

    def call(*arrays, **named):
        own = {name: named.pop(name) for name in _OF_ATTENTION & named.keys()}
        return kernel(PagedAttentionArgs(*arrays, **own), **named)

    return call
