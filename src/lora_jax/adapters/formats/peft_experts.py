"""LoRA of experts in the three layouts that files have, as stacked rank rows per site.

- Per expert (transformers 4): one A [r, in] and B [out, r] per expert, found by their names.
- Fused flat (target_parameters, PEFT >= 0.17): A [E*r, .] expert-major, B [., r*E] with the expert
  index fastest; delta_e = scaling * B[:, :, e] A[e]. `experts.base_layer` is gate_up when both
  parameters are trained. Which side is the input depends on the PEFT version: see `natural`.
- Shared outer: 3-D A [1 or E, r, in] and B [E or 1, out, r], a leading 1 for all experts.

Rows of the last two are views of the file's tensors.
"""

import dataclasses
import re

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.formats.peft_names import LoraPair, Target, find_target
from lora_jax.adapters.weights import SiteWeights

GATE, UP, DOWN = "experts.gate_proj", "experts.up_proj", "experts.down_proj"
_LEAVES = ("gate_up_proj", "down_proj")
_CONTAINER = re.compile(r"(?P<container>(?:.*\.)?experts)(?P<nesting>(?:\.base_layer)*)")
_PROBES = ("0.gate_proj", "0.w1", "0.down_proj", "0.w2", *_LEAVES)
_NATURAL_SINCE = (0, 19, 1)  # PEFT: A of stacked experts is on the input side
_SETTLED_SINCE = (0, 21, 0)  # and so in its development versions
_SITES = dict[tuple[str, int], SiteWeights]


@dataclasses.dataclass(frozen=True)
class Fused:
    """The stacked experts of one layer, with the sizes of their two parameters."""

    path: str
    layer: int
    num_experts: int
    hidden: int
    intermediate: int

    def sizes(self, leaf: str) -> tuple[int, int]:
        """Return (d_in, d_out) of `gate_up_proj` or `down_proj`."""
        if leaf == "gate_up_proj":
            return self.hidden, 2 * self.intermediate
        return self.intermediate, self.hidden


def container_of(path: str) -> tuple[str, int] | None:
    """Return (container path, nesting depth) when the path names stacked experts."""
    match = _CONTAINER.fullmatch(path)
    if match is None:
        return None
    return match["container"], match["nesting"].count(".base_layer")


def find_fused(container: str, catalogue: LoraCatalogue) -> Fused | None:
    """Return the stacked experts that `container` stands for; None when no rule leads there."""
    for probe in ("", *_PROBES):
        target = find_target(f"{container}.{probe}" if probe else container, catalogue)
        if target and target.modules[0].num_experts and not target.is_kv_b:
            gate = catalogue.modules[GATE]
            return Fused(container, target.layer, gate.num_experts, gate.d_in, gate.d_out)
    return None


def read_fused(
    fused: Fused, pairs: dict[int, LoraPair], config: PeftConfig, catalogue: LoraCatalogue
) -> _SITES:
    """Return the sites of one layer's stacked experts; `pairs` are keyed by nesting depth."""
    leaves = _leaves(fused, pairs, config)
    is_natural = _orientation(fused, leaves, config, catalogue)
    sites: _SITES = {}
    for leaf, pair in leaves.items():
        key = f"{fused.path}.{leaf}"
        a, b = _unstack(fused, pair, is_natural)
        rank, want = a.shape[1], config.rank_of(key)
        if leaf == "down_proj":
            _check_rank(pair, rank, want)
            sites[DOWN, fused.layer] = SiteWeights(a, b, config.scaling_of(key, rank))
        else:
            halves = _gate_up(a, b, catalogue.interleaved_gate_up)
            legacy = rank == 2 * want and halves[0][0].shape[1] == want
            if not legacy:
                _check_rank(pair, rank, want)
            scaling = config.scaling_of(key, want)
            for name, (half_a, half_b) in zip((GATE, UP), halves, strict=True):
                sites[name, fused.layer] = SiteWeights(half_a, half_b, scaling)
    return sites


def _check_rank(pair: LoraPair, rank: int, want: int) -> None:
    if rank != want:
        raise ValueError(f"{pair.a.name} has rank {rank}, the config says {want}.")


def _leaves(fused: Fused, pairs: dict[int, LoraPair], config: PeftConfig) -> dict[str, LoraPair]:
    """Return which pair belongs to which parameter."""
    depths = sorted(pairs)
    if depths == [0, 1]:
        return {"gate_up_proj": pairs[1], "down_proj": pairs[0]}
    if depths != [0]:
        raise ValueError(
            f"{pairs[depths[-1]].a.name} is nested {depths[-1]} deep without the levels above it, "
            "or more than gate_up_proj and down_proj were trained; expert biases are not supported."
        )
    named = [leaf for leaf in _LEAVES if config.targets(f"{fused.path}.{leaf}")]
    if len(named) == 2:
        raise ValueError(f"{fused.path} has one pair of matrices for two target_parameters.")
    if not named:
        named = [leaf for leaf in _LEAVES if _ways(fused, leaf, pairs[0])]
        if not named:  # at most one fits: the sizes H, I and 2I cannot all be equal
            raise ValueError(
                f"{pairs[0].a.name} {pairs[0].a.shape} with {pairs[0].b.name} {pairs[0].b.shape} "
                f"fits neither gate_up_proj nor down_proj of {fused.num_experts} experts."
            )
    return {named[0]: pairs[0]}


def _ways(fused: Fused, leaf: str, pair: LoraPair) -> set[bool]:
    """Return the orientations that the shapes allow: True is A on the input side."""
    d_in, d_out = fused.sizes(leaf)
    if len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
        return set()
    (a_rows, a_width), (b_width, b_rows) = pair.a.shape, pair.b.shape
    if a_rows != b_rows or a_rows % fused.num_experts:
        return set()
    sizes = (a_width, b_width)
    return {way for way, want in ((True, (d_in, d_out)), (False, (d_out, d_in))) if sizes == want}


def _orientation(
    fused: Fused, leaves: dict[str, LoraPair], config: PeftConfig, catalogue: LoraCatalogue
) -> bool:
    """Return whether A is on the input side: by the shapes, else by the version that wrote it."""
    possible = {True, False}
    for leaf, pair in leaves.items():
        ways = _ways(fused, leaf, pair)
        if not ways:
            d_in, d_out = fused.sizes(leaf)
            raise ValueError(
                f"{pair.a.name} {pair.a.shape} with {pair.b.name} {pair.b.shape} do not fit "
                f"{leaf} of {fused.num_experts} experts {d_in} -> {d_out}."
            )
        possible &= ways
    if not possible:
        raise ValueError(f"{fused.path}: gate_up_proj and down_proj have opposite orientations.")
    if len(possible) == 1:
        return possible.pop()
    written = natural(config.peft_version, catalogue.interleaved_gate_up)
    if written is None:
        names = ", ".join(pair.a.name for pair in leaves.values())
        raise ValueError(
            f"{names}: the matrices are square, and without a peft_version it is not known which "
            "side is the input."
        )
    return written


def natural(peft_version: str | None, transposed: bool) -> bool | None:
    """Return whether this PEFT writes A on the input side; None when the version does not tell.

    `transposed` models (GPT-OSS) keep experts as [E, in, out], the others as [E, out, in]. PEFT's
    stacked A was as wide as dimension 1 up to 0.18; 0.19.0 took dimension 2 of transposed ones;
    from 0.19.1 on it is as wide as the input. Development versions may be either.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", peft_version or "")
    if match is None:
        return None
    version = tuple(int(part) for part in match.groups()[:3])
    if "dev" in match[4] and version < _SETTLED_SINCE:
        return None
    if version >= _NATURAL_SINCE:
        return True
    return transposed and version < (0, 19, 0)


def _unstack(fused: Fused, pair: LoraPair, is_natural: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return A [E, r, d_in] and B [E, r, d_out]."""
    a, b = pair.a.read(), pair.b.read()
    by_expert = a.reshape(fused.num_experts, -1, a.shape[1])
    by_rank = b.reshape(b.shape[0], -1, fused.num_experts).transpose(2, 1, 0)
    return (by_expert, by_rank) if is_natural else (by_rank, by_expert)


def _gate_up(
    a: np.ndarray, b: np.ndarray, interleaved: bool
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (A, B) of gate and of up, which share A.

    PEFT rewrites LoRA on separate gate and up as one of twice the rank, whose B is zero where the
    ranks of the one meet the outputs of the other; those are given back their own rank.
    """
    size, half = b.shape[2] // 2, a.shape[1] // 2
    gate, up = (b[..., ::2], b[..., 1::2]) if interleaved else (b[..., :size], b[..., size:])
    if not are_apart(gate, up):
        return (a, gate), (a, up)
    return (a[:, :half], gate[:, :half]), (a[:, half:], up[:, half:])


def are_apart(gate: np.ndarray, up: np.ndarray) -> bool:
    """Return whether B of gate and B of up [experts, rank, width] use half of the rank each."""
    half = gate.shape[1] // 2
    return gate.shape[1] % 2 == 0 and not (_any(gate[:, half:]) or _any(up[:, :half]))


def _any(values: np.ndarray) -> bool:
    """Return values.any(), at once where a number of the first row is not zero."""
    return bool(values[:1, :1].any() or values.any())


def find_shared(path: str, catalogue: LoraCatalogue) -> Target | None:
    """Return what a path such as `experts.w1` stands for: one module of all experts."""
    container, _, leaf = path.rpartition(".")
    if container_of(container) is None:
        return None
    target = find_target(f"{container}.0.{leaf}", catalogue)
    return target and dataclasses.replace(target, path=path, expert=None)


def read_shared(pair: LoraPair, target: Target, config: PeftConfig) -> _SITES:
    """Return the site of a 3-D pair, A [1 or E, r, d_in] and B [1 or E, d_out, r].

    Raises ValueError naming both tensors where they do not fit the experts.
    """
    module = target.modules[0]
    a, b, sizes = pair.a.shape, pair.b.shape, {1, module.num_experts}
    want = (module.d_in, module.d_out)
    fits = len(a) == len(b) == 3 and (a[2], b[1]) == want and a[1] == b[2]
    if not fits or not {a[0], b[0]} <= sizes or len(target.modules) != 1:
        raise ValueError(
            f"{pair.a.name} {a} with {pair.b.name} {b} do not fit {module.num_experts} experts "
            f"{module.d_in} -> {module.d_out}: (1 or {module.num_experts}, rank, {module.d_in}) "
            f"and (1 or {module.num_experts}, {module.d_out}, rank)."
        )
    rank = a[1]
    _check_rank(pair, rank, config.rank_of(pair.path))
    rows_a, rows_b = pair.a.read(), pair.b.read().transpose(0, 2, 1)
    scaling = config.scaling_of(pair.path, rank)
    return {(module.name, target.layer): SiteWeights(rows_a, rows_b, scaling)}


def stack_experts(module: LoraModule, sites: dict[int, SiteWeights]) -> SiteWeights:
    """Return one site from the LoRA of single experts; the others get zero rows.

    Experts of smaller rank are filled up with zero rows. Where scalings differ, B takes up the
    difference, in float32.
    """
    first = sites[min(sites)]
    rank = max(site.rank for site in sites.values())
    same = all(site.scaling == first.scaling for site in sites.values())
    scaling = first.scaling if same else 1.0
    dtype = first.a.dtype
    if not same or any(m.dtype != dtype for s in sites.values() for m in (s.a, s.b)):
        dtype = np.dtype(np.float32)
    a = np.zeros((module.num_experts, rank, module.d_in), dtype)
    b = np.zeros((module.num_experts, rank, module.d_out), dtype)
    for expert, site in sites.items():
        a[expert, : site.rank] = site.a[0]
        b[expert, : site.rank] = site.b[0] if same else site.b[0].astype(dtype) * site.scaling
    return SiteWeights(a, b, scaling)
