"""A LoRA and an ESFT adapter that serve a request together, each resident in its own kind."""

import dataclasses

from lora_jax.adapters.entries import AdapterEntry, PairWeights
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AnyWeights
from serving.loading.residency import AbstractResidency, Failures


@dataclasses.dataclass(eq=False)
class _Pair:
    """Two adapters that live requests use together."""

    weights: PairWeights
    requests: int = 0

    @property
    def digests(self) -> tuple[str, str]:
        return self.weights.lora.digest, self.weights.esft.digest


class PairResidency(AbstractResidency):
    """Pairs of adapters. A pair is resident while both of its adapters are.

    The slot of a pair comes after all others: see serving.steps.step.split_slots.
    """

    kind = AdapterKind.PAIR

    def __init__(
        self, lora: AbstractResidency, esft: AbstractResidency, num_lora_slots: int, num_slots: int
    ):
        """`num_slots` are those of both kinds, of which LoRA's come first."""
        self._lora, self._esft = lora, esft
        self._num_lora_slots, self._num_slots = num_lora_slots, num_slots
        self._pairs: dict[str, _Pair] = {}

    def check_fits(self, weights: AnyWeights) -> None:
        """The adapters of a pair fit: their own kinds were asked."""
        del weights

    def knows(self, digest: str) -> bool:
        return digest in self._pairs

    def acquire(self, digest: str) -> int | None:
        """Return the slot, with one more user of each adapter, or None and none more."""
        of_lora, of_esft = self._pairs[digest].digests
        lora, esft = self._lora.acquire(of_lora), self._esft.acquire(of_esft)
        if lora is not None and esft is not None:
            index = (esft - self._num_lora_slots) * self._num_lora_slots + lora
            return self._num_slots + index
        if lora is not None:
            self._lora.release(of_lora)
        if esft is not None:
            self._esft.release(of_esft)
        return None

    def release(self, digest: str) -> None:
        lora, esft = self._pairs[digest].digests
        self._lora.release(lora)
        self._esft.release(esft)

    def is_loading(self, digest: str) -> bool:
        lora, esft = self._pairs[digest].digests
        return self._lora.is_loading(lora) or self._esft.is_loading(esft)

    def pool_of(self, digest: str) -> AdapterKind | None:
        return AdapterKind.LORA

    def retain(self, entry: AdapterEntry) -> None:
        assert isinstance(entry.weights, PairWeights), "found by its kind"
        pair = self._pairs.setdefault(entry.digest, _Pair(entry.weights))
        pair.requests += 1
        self._lora.retain(pair.weights.lora)
        self._esft.retain(pair.weights.esft)

    def drop(self, digest: str) -> None:
        pair = self._pairs[digest]
        pair.requests -= 1
        if not pair.requests:
            del self._pairs[digest]
        lora, esft = pair.digests
        self._lora.drop(lora)
        self._esft.drop(esft)

    def failed_with(self, failures: Failures) -> Failures:
        pairs = tuple(self._pairs.items())  # a copy, made in one go: others may `retain`
        return [(d, why) for failed, why in failures for d, pair in pairs if failed in pair.digests]

    def check_integrity(self) -> None:
        assert not self._pairs, f"{len(self._pairs)} pairs are kept for nobody"
