"""Kinds of adapters. No jax."""

import enum


class AdapterKind(enum.StrEnum):
    """Kind of an adapter; the value is its name in reports, metrics and JSON."""

    LORA = "lora"
    ESFT = "esft"
    PAIR = "pair"  # a LoRA and an ESFT adapter that serve a request together
