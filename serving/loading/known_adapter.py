"""An adapter as its loader sees it: weights, names that stand for them, requests. No jax."""

import dataclasses
import math

from lora_jax.adapters.weights import AnyWeights

RATE_S = 600.0  # after so long a request counts a third of a new one


@dataclasses.dataclass(eq=False)
class KnownAdapter:
    """Weights of one digest, names that stand for them, and how many live requests need them."""

    weights: AnyWeights
    names: dict[str, bool] = dataclasses.field(default_factory=dict)  # and which of them pin it
    requests: int = 0
    retry_s: float = 0.0  # no load before this time
    lacked_memory: bool = False  # the last load
    arrivals: float = 0.0  # requests that named it, older ones counting less
    arrived_s: float = 0.0  # the last of them

    def arrive(self, now: float) -> None:
        """Count a request."""
        self.arrivals, self.arrived_s = self.rate(now) + 1, now

    def rate(self, now: float) -> float:
        """Return the requests of about the last RATE_S seconds."""
        return self.arrivals * math.exp((self.arrived_s - now) / RATE_S)

    @property
    def named(self) -> bool:
        """True if a name stands for it."""
        return bool(self.names)

    @property
    def pinned(self) -> bool:
        """True if it is never evicted to make room."""
        return any(self.names.values())

    @property
    def wanted(self) -> bool:
        """True if others may have to go for its sake."""
        return self.requests > 0 or self.pinned
