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
        self._experts: dict[str, int] = {}  # slots that pairs hold which wait for LoRA's part

    def check_fits(self, weights: AnyWeights) -> None:
        """The adapters of a pair fit: their own kinds were asked."""
        del weights

    def knows(self, digest: str) -> bool:
        return digest in self._pairs

    def acquire(self, digest: str) -> int | None:
        """Return the slot, with one more user of each adapter, or None.

        The experts come first, and stay while LoRA's part is on its way. Otherwise pairs that have
        one of their adapters each would take it from one another for ever; as all of them wait for
        LoRA's part with the other one in hand, none waits for what such a one holds.
        """
        of_lora, of_esft = self._pairs[digest].digests
        esft = self._experts.pop(digest, None)
        if esft is None:
            esft = self._esft.acquire(of_esft)
        if esft is None and not self._esft.is_loading(of_esft):
            return None  # others use all slots: LoRA's part would be loaded, and idle, meanwhile
        lora = self._lora.acquire(of_lora)
        if lora is not None and esft is not None:
            index = (esft - self._num_lora_slots) * self._num_lora_slots + lora
            return self._num_slots + index
        if lora is not None:
            self._lora.release(of_lora)
        if esft is not None:
            self._experts[digest] = esft
        return None

    def release(self, digest: str) -> None:
        lora, esft = self._pairs[digest].digests
        self._lora.release(lora)
        self._esft.release(esft)

    def is_loading(self, digest: str) -> bool:
        lora, esft = self._pairs[digest].digests
        return self._lora.is_loading(lora) or self._esft.is_loading(esft)

    def is_resident(self, digest: str) -> bool:
        lora, esft = self._pairs[digest].digests
        return self._lora.is_resident(lora) and self._esft.is_resident(esft)

    def protect(self, digests: frozenset[str]) -> None:
        """Have both kinds protect the adapters of these pairs too, beside `digests`."""
        held = [self._pairs[digest].digests for digest in digests & self._pairs.keys()]
        if held:
            both = digests.union(*held)
            self._lora.protect(both)
            self._esft.protect(both)

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
        lora, esft = pair.digests
        if not pair.requests:
            del self._pairs[digest]
            if self._experts.pop(digest, None) is not None:
                self._esft.release(esft)
        self._lora.drop(lora)
        self._esft.drop(esft)

    def failed_with(self, failures: Failures) -> Failures:
        pairs = tuple(self._pairs.items())  # a copy, made in one go: others may `retain`
        return [(d, why) for failed, why in failures for d, pair in pairs if failed in pair.digests]

    def check_integrity(self) -> None:
        assert not self._pairs, f"{len(self._pairs)} pairs are kept for nobody"
        assert not self._experts, f"experts are held for {len(self._experts)} pairs that have gone"
