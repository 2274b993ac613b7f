"""Inputs of a step beside the model and the host's tables."""

from typing import NamedTuple

import jax

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.kv_cache import PagedKVCache
from lora_jax.typing import Array, Int
from serving.lora_server.client import RemoteTable
from serving.steps.device_state import RowState
from serving.steps.image_encoder import ImageOperands


class MergedOperands(NamedTuple):
    """The model's leaves with an adapter merged into them, and its slot."""

    leaves: tuple[jax.Array, ...]
    slot: Int[Array, ""]


class Operands(NamedTuple):
    """Inputs of a step beside the model.

    The state's history is donated to it, and the cache if it is its own.
    """

    cache: PagedKVCache
    state: RowState
    slots: AdapterSlots | None
    reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None
    remote_table: RemoteTable | None
    images: ImageOperands | None = None
    merged: MergedOperands | None = None  # in the place of the plain model
