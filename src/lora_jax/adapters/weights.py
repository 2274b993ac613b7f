"""A whole adapter on the host, LoRA or ESFT, and the report of what was read. No jax."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lora_jax.adapters.added_tokens import AddedToken
from lora_jax.adapters.host_rows import HostRun, host_runs
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.row_ranges import need_of
from lora_jax.adapters.task_head import TaskHead
from lora_jax.rank_rows import quantised, value_width

_ALIGNMENT = 8  # bytes


@dataclasses.dataclass(frozen=True, eq=False)
class SiteWeights:
    """LoRA of one site: y += scaling * (x A[e]^T) B[e] for rows of expert e.

    `a` is [experts, rank, d_in] and `b` is [experts, rank, d_out], in the file's dtype, or in 8
    bits with 16 more items a row (lora_jax.rank_rows). A leading 1 means one matrix for all
    experts (stride 0), and the only matrix of a site without experts. Sites that share a matrix
    hold the very same array object, which is then stored once. Of a split model both are
    [experts, rank, devices, width], with each device's part (local_widths).
    """

    a: np.ndarray
    b: np.ndarray
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class RawGain:
    """Vectors of a file for the outputs of one site, float32 [d_out] each (adapters.gains)."""

    magnitude: np.ndarray | None = None  # DoRA's
    shift: np.ndarray | None = None  # scaling * lora_B.bias
    bias: np.ndarray | None = None  # the base's, as it was trained


@dataclasses.dataclass(frozen=True)
class ModuleReport:
    """Layers, ranks and scalings of one module's changes (sorted, distinct)."""

    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class AdapterReport:
    """Report of a folder. `digest` is sha256 over the names and hashes of all files read."""

    kind: AdapterKind
    folder: str  # the folder's own name, without its directory
    digest: str
    files: dict[str, str]  # file name -> hash (formats.folder)
    file_bytes: int
    weight_bytes: int  # on the host, shared matrices once
    modules: dict[str, ModuleReport]
    max_rank: int
    num_tensors: int
    base_model: str | None  # base_model_name_or_path of the config
    peft_version: str | None
    warnings: tuple[str, ...] = ()
    experts: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # by layer; ESFT
    head: TaskHead | None = None
    brings: tuple[str, ...] = ()  # what it has beside LoRA, a task head and experts
    added_tokens: tuple[AddedToken, ...] = ()  # which its tokenizer files add, where it has rows

    def as_json(self) -> dict[str, Any]:
        """Return the report as dicts, tuples, strings and numbers, for json.dumps."""
        return dataclasses.asdict(self)


# Tokens whose rows an adapter brings, by "embed_tokens" and "lm_head" (adapters.vocabulary).
TokenIds = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class SiteColumns:
    """An adapter's entries of the table, one row a site, without the places of its rank rows.

    `matrices` int [sites, 2] are the numbers of a and b in the order of `AdapterWeights.matrices`,
    `shapes` int32 [sites, 3] the rank and the rows from one expert's a and b to the next one's.
    """

    modules: tuple[str, ...]
    layers: np.ndarray
    matrices: np.ndarray
    shapes: np.ndarray
    scaling: np.ndarray  # float32


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterWeights:
    """Every site a LoRA adapter changes, keyed (module name, layer), with the report.

    `gains` are those of a file, which become sites when the base's weights are known. `token_ids`
    are the tokens of the rows of the vocabulary that the adapter trained.
    """

    sites: dict[tuple[str, int], SiteWeights]
    report: AdapterReport
    gains: Mapping[tuple[str, int], RawGain] = dataclasses.field(default_factory=dict, kw_only=True)
    token_ids: TokenIds = dataclasses.field(default_factory=dict, kw_only=True)

    @property
    def digest(self) -> str:
        return self.report.digest

    def matrices(self) -> Iterator[np.ndarray]:
        """Yield each distinct matrix [experts or 1, rank, width] once, in a fixed order."""
        seen: set[int] = set()
        for key in sorted(self.sites):
            for matrix in (self.sites[key].a, self.sites[key].b):
                if id(matrix) not in seen:
                    seen.add(id(matrix))
                    yield matrix

    @functools.cached_property
    def demand(self) -> tuple[tuple[int, int], ...]:
        """(width, rows) of each distinct matrix, in the order of `matrices`."""
        widths = ((value_width(m.shape[-1], m.dtype), m) for m in self.matrices())
        return tuple((width, m.shape[0] * m.shape[1]) for width, m in widths)

    @functools.cached_property
    def site_columns(self) -> SiteColumns:
        """Return what the table says of the sites, in the order of `sites`."""
        numbers = {id(matrix): number for number, matrix in enumerate(self.matrices())}
        sites = self.sites.values()
        strides = ([s.rank if m.shape[0] > 1 else 0 for m in (s.a, s.b)] for s in sites)
        shapes = [(site.rank, *both) for site, both in zip(sites, strides, strict=True)]
        return SiteColumns(
            tuple(module for module, _ in self.sites),
            np.array([layer for _, layer in self.sites], np.intp),
            np.array([(numbers[id(s.a)], numbers[id(s.b)]) for s in sites], np.intp).reshape(-1, 2),
            np.array(shapes, np.int32).reshape(-1, 3),
            np.array([site.scaling for site in sites], np.float32),
        )

    @functools.cached_property
    def host_runs(self) -> tuple[HostRun, ...]:
        """The matrices' rows, with numbers in the order of `matrices`."""
        return host_runs(self.matrices())

    def in_8_bits(self) -> "AdapterWeights":
        """Return the adapter with rank rows in 8 bits; sites go on sharing their matrices."""
        return self._as({id(matrix): quantised(matrix) for matrix in self.matrices()})

    def narrowed(self, dtype: np.dtype) -> "AdapterWeights":
        """Return the adapter with rank rows of `dtype` where that is narrower than their own.

        Sites go on sharing their matrices.
        """
        found = tuple(self.matrices())
        wider = {id(matrix) for matrix in found if matrix.dtype.itemsize > dtype.itemsize}
        if not wider:
            return self
        return self._as({id(m): m.astype(dtype) if id(m) in wider else m for m in found})

    def _as(self, made: Mapping[int, np.ndarray]) -> "AdapterWeights":
        """Return the adapter with other matrices, whose bytes its report says."""
        size = sum(matrix.nbytes for matrix in made.values())
        report = dataclasses.replace(self.report, weight_bytes=size)
        return dataclasses.replace(self._with(made), report=report)

    def in_one_block(self) -> "AdapterWeights":
        """Return a copy whose matrices are views of one array, with those of one width together.

        Within a width they keep the order of `matrices`; sites go on sharing theirs. An adapter
        that is such a copy is returned as it is.
        """
        if self._is_block:
            return self
        matrices = block_order(self)
        block = np.empty(sum(map(block_room, matrices)), np.uint8)
        made, start = {}, 0
        for matrix in matrices:
            view = np.ndarray(matrix.shape, matrix.dtype, block, start)
            bits = f"u{matrix.dtype.itemsize}"  # numpy copies these faster than bfloat16
            view.view(bits)[...] = matrix.view(bits)
            made[id(matrix)] = view
            start += block_room(matrix)
        return self._with(made)

    @functools.cached_property
    def _is_block(self) -> bool:
        """True if the matrices are all that lies in one array of bytes."""
        matrices = block_order(self)
        block = matrices[0].base if matrices else None
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8:  # as nothing else is
            return False
        is_one = all(matrix.base is block for matrix in matrices)
        return is_one and sum(map(block_room, matrices)) == block.nbytes

    def _with(self, made: Mapping[int, np.ndarray]) -> "AdapterWeights":
        """Return the adapter with each matrix replaced by that of its id."""
        sites = {
            key: SiteWeights(made[id(site.a)], made[id(site.b)], site.scaling)
            for key, site in self.sites.items()
        }
        return dataclasses.replace(self, sites=sites)

    def known_as(
        self,
        demand: tuple[tuple[int, int], ...],
        site_columns: SiteColumns,
        rows_by_width: dict[int, int],
        host_runs: tuple[HostRun, ...],
    ) -> "AdapterWeights":
        """Return this adapter, which lies in one block, and for which `prepared` computes these."""
        known = {"demand": demand, "site_columns": site_columns, "host_runs": host_runs}
        vars(self).update(known | {"_rows_by_width": rows_by_width, "_is_block": True})
        return self

    def prepared(self) -> "AdapterWeights":
        """Return this adapter with all computed that placing it on a device asks for.

        A reader's thread calls it, so that the engine's thread need not compute it between steps.
        """
        _ = self.site_columns, self.host_runs, self._rows_by_width
        return self

    def rows_by_width(self) -> dict[int, int]:
        """Return how many rank rows of each width the adapter takes on the device."""
        return dict(self._rows_by_width)

    @functools.cached_property
    def _rows_by_width(self) -> dict[int, int]:
        return need_of(self.demand)


def block_order(weights: AdapterWeights) -> list[np.ndarray]:
    """Return the matrices in the order of `AdapterWeights.in_one_block`."""
    return sorted(weights.matrices(), key=lambda matrix: matrix.shape[-1])  # stable


def block_room(matrix: np.ndarray) -> int:
    """Return the bytes of a matrix in a block, where the next one is aligned for any dtype."""
    return -(-matrix.nbytes // _ALIGNMENT) * _ALIGNMENT


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Whole experts that an ESFT adapter puts in the place of the base's, with the report.

    `experts[layer][expert]` holds the matrices [d_out, d_in] in the order of PROJECTIONS, in the
    file's dtype. A layer that is not there keeps all experts of the base.
    """

    experts: dict[int, dict[int, tuple[np.ndarray, ...]]]
    report: AdapterReport

    @property
    def digest(self) -> str:
        return self.report.digest

    @property
    def num_experts(self) -> int:
        """Experts in all layers together."""
        return sum(len(experts) for experts in self.experts.values())


AnyWeights = AdapterWeights | ExpertWeights
