"""The LoRA adapters that merged weights can stand for. No jax."""

import collections
import logging
import math
from collections.abc import Mapping

import numpy as np

from lora_jax.adapters.weights import AdapterWeights, SiteWeights

logger = logging.getLogger(__name__)

_MOST_KNOWN = 4096  # adapters whose answer is kept

Site = tuple[str, int]  # module and layer


class Mergeable:
    """The dense maps that adapters can be merged into; the engine's thread uses it."""

    def __init__(self, norms: Mapping[Site, float], *, mixture: bool):
        """`norms` are the Frobenius norms of the maps. With `mixture` rows of others run on the
        merged weights, so that an adapter must not be larger than they are.
        """
        self._norms, self._mixture = dict(norms), mixture
        self._answers: collections.OrderedDict[str, bool] = collections.OrderedDict()

    def holds(self, weights: AdapterWeights) -> bool:
        """True if these weights can be merged; where not, the log says why, once."""
        digest = weights.digest
        if digest not in self._answers:
            why = self.why_not(weights)
            if why:
                name = weights.report.folder
                logger.info("Adapter %s (%s) is never merged: %s", name, digest[:12], why)
            self._answers[digest] = not why
            if len(self._answers) > _MOST_KNOWN:
                self._answers.popitem(last=False)
        return self._answers[digest]

    def why_not(self, weights: AdapterWeights) -> str:
        """Return why the adapter cannot be merged; nothing if it can."""
        if weights.report.brings:
            return f"it has {', '.join(weights.report.brings)} beside LoRA."
        others = sorted({module for module, layer in weights.sites} - {m for m, _ in self._norms})
        if others:
            return f"it changes {', '.join(others)}, which are not dense maps of the layers."
        for site, at in weights.sites.items():
            if self._mixture and delta_norm(at) > self._norms.get(site, 0.0):
                return (
                    f"at {site[0]} of layer {site[1]} it is larger than the weights themselves, so "
                    "that rows of others would lose precision."
                )
        return ""


def delta_norm(site: SiteWeights) -> float:
    """Return the Frobenius norm of scaling * B A, from the products of their rank rows.

    ||B A||^2 = sum((A A^T) * (B^T B)): rank x rank numbers, never the whole matrix.
    """
    a, b = (np.asarray(m, np.float32).reshape(m.shape[1], -1) for m in (site.a, site.b))
    square = float(np.sum((a @ a.T) * (b @ b.T), dtype=np.float64))
    return abs(site.scaling) * math.sqrt(max(0.0, square))
