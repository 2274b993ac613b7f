"""Forms of a split step that were before others, so that one run compares both.

"owned": rows of whole experts are exchanged with all others' and then chosen, not sent by their
owners alone. "taken": XLA gathers the experts' rows of every device, not those of its own alone.
"""

from collections.abc import Iterable

import jax.numpy as jnp

from lora_jax.nn import moe
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.all_to_all import all_to_all
from lora_jax.ops.reroute import RowMap
from lora_jax.sharding import AXIS, Split
from lora_jax.typing import Array, Float, Int

EARLIER = ("owned", "taken")


def use_earlier(names: Iterable[str]) -> None:
    """Have programs that are traced from now on in this process use these earlier forms."""
    for name in names:
        if name == "owned":
            moe.take_owned = _exchange_all
        else:
            moe._rows_of = _gather_all


def _exchange_all(
    x: Float[Array, "own_rows width"],
    source: Int[Array, "rows"],
    owner: Int[Array, "rows"],
    split: Split,
) -> Float[Array, "rows part"]:
    by_device = all_to_all(x[source], AXIS, group=split.group)
    by_device = by_device.reshape(source.shape[0], split.size, -1)
    return jnp.take_along_axis(by_device, owner[:, None, None], axis=1)[:, 0]


def _gather_all(
    x: Float[Array, "tokens hidden"], map: RowMap, routing: AdapterRouting
) -> Float[Array, "rows hidden"]:
    del routing
    return x[map.row_to_token]
