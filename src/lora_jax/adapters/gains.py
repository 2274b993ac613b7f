"""Outputs that adapters scale and shift: DoRA, biases of LoRA, trained biases of the base. No jax.

A map that gives y = W x + b + scaling * B A x then gives y + gain * y + shift, where

    gain = magnitude / norm - 1             norm[i] = ||(W + scaling * B A)[i]||, 0 without DoRA
    shift = b_trained - (1 + gain) * b + scaling * lora_B.bias

Both are rows of the map's width, stored as two rank rows of a site of their own.
"""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.weights import AdapterWeights, RawGain, SiteWeights

ROWS = 2  # gain and shift
_SUFFIX = ".gain"
_Site = tuple[str, int]


def gain_name(module: str) -> str:
    """Return the name of the module that holds the gain and shift of another one."""
    return module + _SUFFIX


def is_gain(module: str) -> bool:
    """Return whether a module holds the gain and shift of another one."""
    return module.endswith(_SUFFIX)


def with_gains(catalogue: LoraCatalogue, modules: Collection[str]) -> LoraCatalogue:
    """Return the catalogue with room for gain and shift of these modules, in every layer.

    Those of closed modules are closed, too: a file that has them is read before it is refused.
    """
    added = {
        gain_name(name): LoraModule(
            gain_name(name), one.d_out, one.d_out, one.layers, most_rank=ROWS
        )
        for name, one in catalogue.of_base.items()
        if name in modules
    }
    is_open = {gain_name(name) for name in catalogue.modules}
    kept = {name: gain for name, gain in sorted(added.items()) if name in is_open}
    closed = {name: gain for name, gain in sorted(added.items()) if name not in is_open}
    both = {"modules": catalogue.modules | kept, "closed": catalogue.closed | closed}
    return dataclasses.replace(catalogue, **both)


def gain_site(
    raw: RawGain, norm: np.ndarray | None, bias: np.ndarray | None, where: str
) -> SiteWeights:
    """Return gain and shift as rows [1, 2, d_out], given the weights' norm and the base's bias.

    Raises ValueError naming `where` for a bias that the base does not have, and a norm of 0.
    """
    if raw.bias is not None and bias is None:
        raise ValueError(f"the base model has no bias at {where}, and the adapter trained one.")
    width = next(len(v) for v in (raw.magnitude, raw.shift, raw.bias) if v is not None)
    rows = np.zeros((1, ROWS, width), np.float32)
    gain, shift = rows[0]
    if raw.magnitude is not None and norm is not None:
        if not norm.all():
            raise ValueError(f"DoRA at {where}: an output of the adapted weights has norm 0.")
        gain[:] = raw.magnitude / norm - 1
    if bias is not None:
        shift += (bias if raw.bias is None else raw.bias) - (1 + gain) * bias
    if raw.shift is not None:
        shift += raw.shift
    return SiteWeights(rows, rows, 1.0)


def resolved(weights: AdapterWeights, made: Mapping[_Site, SiteWeights]) -> AdapterWeights:
    """Return the adapter with sites for its gains, `made` of them by their modules' names."""
    sites = dict(weights.sites)
    for (module, layer), site in made.items():
        sites[gain_name(module), layer] = site
    size = weights.report.weight_bytes + sum(site.a.nbytes for site in made.values())
    report = dataclasses.replace(weights.report, weight_bytes=size)
    return dataclasses.replace(weights, sites=sites, report=report, gains={})
