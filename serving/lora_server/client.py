"""An LLM instance's side of a LoRA Server, inside the jitted step.

`ServerLink` is what the host keeps; `start` makes of it, while a step is traced, what the layers
push to (`RemoteExperts`). Twice per layer rows leave before the base's grouped matmul, and their
deltas are added after it; twice more if attention's adapters are on the server too.
"""

import abc
import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from lora_jax.nn.gather import worst_of_devices
from lora_jax.sharding import Split
from lora_jax.typing import Array, Float, Int
from serving.lora_server.shards import SITES, ShardLayout
from serving.lora_server.transport.base import AbstractClient, PushRows, push_rows

_SITE_OF = {modules: site for site, modules in SITES.items()}
LOCAL = -1  # the number of a slot whose adapter has no part on the server


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RemoteTable:
    """Under which number the server knows the adapter in each of the instance's slots."""

    slot_to_number: Int[Array, "slots"]  # LOCAL: nothing of it is there
    version: Int[Array, ""]  # of the server's table, as last heard of


class Layout(Protocol):
    """Modules of a base model that other processes compute."""

    def has(self, module: str, layer: int) -> bool: ...


class ServerLink:
    """The way to all ranks of one LoRA Server by one transport."""

    def __init__(
        self,
        layout: ShardLayout,
        client: AbstractClient,
        *,
        has_local: bool = False,
        overlap: bool = True,
    ):
        """`has_local`: adapters may have their experts in the instance's own slots too. Without
        `overlap` the base waits until the answer is there: for comparison only.

        Raises ValueError when the transport has not as many servers as the layout has ranks.
        """
        if client.servers != layout.num_ranks:
            raise ValueError(
                f"The placement {layout.placement.name} has {layout.num_ranks} ranks, but "
                f"{client.servers} servers are connected."
            )
        self.layout, self.client = layout, client
        self.has_local, self.overlap = has_local, overlap

    def start(self, table: RemoteTable, split: Split | None = None) -> "StepExperts":
        """Return what the layers of one step push to; only while that step is traced.

        With `split` it is that of one device, whose experts are whole.
        """
        return StepExperts(self, table, split)


class AbstractStep[Sites: Layout](abc.ABC):
    """The `RemoteExperts` of one traced step (nn.remote); gathers the statuses of its exchanges."""

    has_local = False

    def __init__(
        self,
        layout: Sites,
        client: AbstractClient,
        table: RemoteTable,
        *,
        overlap: bool = True,
        split: Split | None = None,
    ):
        """`overlap` as for ServerLink, `split` as for its `start`."""
        self._layout, self.client, self._table = layout, client, table
        self._overlap, self._split = overlap, split
        self.statuses: list[jax.Array] = []

    def has(self, module: str, layer: int) -> bool:
        """True if other processes compute this module of the layer."""
        return self._layout.has(module, layer)

    def exchange(
        self,
        modules: tuple[str, ...],
        layer: int,
        row_to_slot: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"] | None,
        num_rows: Int[Array, ""],
    ) -> "LayerExchange | SerialExchange":
        """Return the exchange of one site; see nn.remote."""
        if row_to_expert is None:  # who has the first expert of a layer has what is of no expert
            row_to_expert = jnp.zeros_like(row_to_slot)
        numbers = self._table.slot_to_number[jnp.maximum(row_to_slot, 0)]
        numbers = jnp.where(row_to_slot >= 0, numbers, LOCAL)
        given = modules, layer, numbers, row_to_expert, num_rows
        exchange = LayerExchange(self, *self._destination(*given))
        return exchange if self._overlap else SerialExchange(exchange)

    @abc.abstractmethod
    def _destination(
        self,
        modules: tuple[str, ...],
        layer: int,
        numbers: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"],
        num_rows: Int[Array, ""],
    ) -> tuple[int, int, PushRows]:
        """Return the site, the layer among those of the layout, and where each row goes.

        `numbers` are the table's for the rows, LOCAL where a row has no adapter.
        """

    def status(self) -> Int[Array, "servers"]:
        """Return the worst status of each server in the step; 0 means that every answer came.

        In a split model it is the worst of all devices.
        """
        worst = jnp.zeros((self.client.servers,), jnp.int32)
        for status in self.statuses:
            worst = jnp.maximum(worst, status)
        return worst_of_devices(worst, self._split)


class StepExperts(AbstractStep[ShardLayout]):
    """One step's way to the ranks of a LoRA Server."""

    def __init__(self, link: ServerLink, table: RemoteTable, split: Split | None):
        super().__init__(link.layout, link.client, table, overlap=link.overlap, split=split)
        self.has_local = link.has_local

    def _destination(
        self,
        modules: tuple[str, ...],
        layer: int,
        numbers: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"],
        num_rows: Int[Array, ""],
    ) -> tuple[int, int, PushRows]:
        index, placement = self._layout.moe_layers.index(layer), self._layout.placement
        version = self._table.version
        rows = push_rows(placement, index, numbers, row_to_expert, num_rows, version)
        return _SITE_OF[modules], index, rows


class Step(Protocol):
    """One traced step: the client of its rows, and the statuses of its exchanges."""

    client: AbstractClient
    statuses: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class LayerExchange:
    """The `Exchange` of one site of one layer."""

    step: Step
    site: int
    index: int  # of the layer among those of the layout
    rows: PushRows

    def push(self, x: Float[Array, "rows d_in"]) -> Float[Array, "rows d_in"]:
        """Return x once its rows are on their way."""
        return self.step.client.push(x, self.site, self.index, self.rows)

    def wait_add(
        self, ys: tuple[Float[Array, "rows _"], ...], x: Float[Array, "rows d_in"]
    ) -> tuple[Float[Array, "rows _"], ...]:
        """Return ys plus the deltas that came back."""
        ys, status = self.step.client.wait_add(ys, x, self.site, self.rows)
        self.step.statuses.append(status)
        return ys


class SerialExchange:
    """A LayerExchange whose answer is there before the base begins (InfiniLoRA, section 6.4).

    What disaggregation costs when nothing is hidden. The bits are those of the other.
    """

    def __init__(self, exchange: LayerExchange):
        self._exchange = exchange
        self._deltas: tuple[jax.Array, ...] = ()

    def push(self, x: Float[Array, "rows d_in"]) -> Float[Array, "rows d_in"]:
        """Return x once the deltas have come back."""
        exchange = self._exchange
        site = exchange.step.client.shapes.sites[exchange.site]
        nothing = tuple(jnp.zeros((x.shape[0], width), jnp.float32) for width in site.d_outs)
        x = exchange.push(x)
        self._deltas = exchange.wait_add(nothing, x)
        # No status is negative, which the compiler does not know: x has to wait for it.
        return jnp.where(jnp.min(exchange.step.statuses[-1]) < 0, jnp.zeros_like(x), x)

    def wait_add(
        self, ys: tuple[Float[Array, "rows _"], ...], x: Float[Array, "rows d_in"]
    ) -> tuple[Float[Array, "rows _"], ...]:
        """Return ys plus the deltas that `push` waited for."""
        del x
        added = zip(ys, self._deltas, strict=True)
        return tuple((y.astype(jnp.float32) + delta).astype(y.dtype) for y, delta in added)
