"""Compatibility terms of an instance and a LoRA Server. No jax."""

import dataclasses

from lora_jax.placement.ep_pp import ServerLayout
from serving.lora_server.transport.header import MAGIC
from serving.lora_server.transport.shapes import Shapes

_REMEDY = {
    "protocol": "install the same release on both sides",
    "base model": "start both sides with the same model",
    "placement": "start both sides with the same --placement",
    "server rank": "give the servers' addresses in the order of their ranks",
    "rows in a slot": "start both sides with the same largest batch",
}
_REMEDY_OTHERWISE = "start both sides with the same model, dtype and LoRA options"


@dataclasses.dataclass(frozen=True)
class Terms:
    """The base model by a digest of its config and weights, the plan, and the slots' shapes.

    `adapters` is the dtype of rank rows, "auto" for the base model's.

    Raises ValueError where plan and shapes count different layers.
    """

    base: str
    placement: ServerLayout
    shapes: Shapes
    adapters: str = "auto"

    def __post_init__(self) -> None:
        if self.shapes.layers != self.placement.shape.layers:
            raise ValueError(
                f"The slots are for {self.shapes.layers} layers and the plan "
                f"{self.placement.name} has {self.placement.shape.layers}."
            )

    def facts(self, rank: int) -> dict[str, str | int]:
        """Return all that must be equal on both sides of a connection to server `rank`."""
        shapes = self.shapes
        return {
            "protocol": MAGIC,
            "base model": self.base,
            "placement": self.placement.name,
            "server rank": rank,
            "layers": shapes.layers,
            "experts": self.placement.shape.experts,
            "rows in a slot": shapes.max_rows,
            "dtype": shapes.dtype,
            "dtype of results": shapes.delta_dtype,
            "dtype of adapters": self.adapters,
            "sites": "; ".join(f"{s.name} {s.d_in} to {s.d_outs}" for s in shapes.sites),
        }


def mismatch(server: dict[str, str | int], client: dict) -> str | None:
    """Return what differs between two sides' facts and what to change, or None."""
    wrong = [
        f"{name}: the server has {value}, the instance {client.get(name, 'nothing')}; "
        f"{_REMEDY.get(name, _REMEDY_OTHERWISE)}."
        for name, value in server.items()
        if client.get(name) != value
    ]
    return " ".join(wrong) or None
