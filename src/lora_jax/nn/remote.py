"""Interface of a layer to adapters that a LoRA Server computes.

With a LoRA Server (InfiniLoRA, section 3) the experts' adapters, and attention's too if that was
asked for, are not on this device: the layer pushes the rows of each site, runs its own matmul
meanwhile and adds what comes back. Who carries the rows is not known here.
"""

from typing import Protocol, runtime_checkable

from lora_jax.typing import Array, Float, Int


@runtime_checkable
class Exchange(Protocol):
    """One site of one layer, while a step is traced."""

    def push(self, x: Float[Array, "rows d_in"]) -> Float[Array, "rows d_in"]:
        """Return x once its rows are on their way; the base computation must consume this x."""
        ...

    def wait_add(
        self, ys: tuple[Float[Array, "rows _"], ...], x: Float[Array, "rows d_in"]
    ) -> tuple[Float[Array, "rows _"], ...]:
        """Return ys plus what the adapters of the rows add to each; x is what `push` returned.

        Rows without an adapter come back unchanged, bit for bit, and so do all rows when the
        answer fails; who made the exchange learns of that.
        """
        ...


@runtime_checkable
class RemoteExperts(Protocol):
    """A part of all adapters, somewhere else; lives while a step is traced.

    With `has_local` that of some adapters is on this device: an exchange leaves their rows alone.
    """

    has_local: bool

    def has(self, module: str, layer: int) -> bool:
        """True if what adapters add to this module of the layer is computed there."""
        ...

    def exchange(
        self,
        modules: tuple[str, ...],
        layer: int,
        row_to_slot: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"] | None,
        num_rows: Int[Array, ""],
    ) -> Exchange:
        """Return the exchange of these modules, which share one x; of experts for sorted rows.

        `row_to_slot` names this device's own adapter slots, -1 for the base model. Rows at or
        after `num_rows` are padding.
        """
        ...
