"""Message layout of a transport: sites, widths, and row offsets in a slot. No jax."""

import dataclasses

import ml_dtypes
import numpy as np

from serving.lora_server.transport.header import HEADER_BYTES

GATE_UP, DOWN, QKV, OUT = range(4)  # the sites of a layer, the last two if attention's are remote
PAGE = 4096
_LINE = 64  # what XLA wants of an address that it uses without a copy
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Site:
    """One exchange of a layer: [rows, d_in] goes, a [rows, d] comes back for each of d_outs."""

    name: str
    d_in: int
    d_outs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of one channel. `max_rows` is the most rows of one message.

    `dtype` is that of the rows, `delta_dtype` that of the results: float32 results of bfloat16
    rows are rounded once, where they are added, as if the adapter were local. Raises ValueError
    for sizes below one and for other dtypes.
    """

    layers: int
    max_rows: int
    dtype: str
    delta_dtype: str
    sites: tuple[Site, ...]

    def __post_init__(self) -> None:
        sizes = {"layers": self.layers, "max_rows": self.max_rows, "sites": len(self.sites)}
        for site in self.sites:
            sizes[f"{site.name}.d_in"] = site.d_in
            sizes[f"{site.name}.d_outs"] = min(site.d_outs, default=0)
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in (self.dtype, self.delta_dtype):
            if name not in _DTYPES:
                raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}.")
        if self.dtype == "float32" and self.delta_dtype != "float32":
            raise ValueError("Results of float32 rows must be float32.")

    @property
    def row_dtype(self) -> np.dtype:
        """dtype of the rows that go."""
        return _DTYPES[self.dtype]

    @property
    def result_dtype(self) -> np.dtype:
        """dtype of the results that come back."""
        return _DTYPES[self.delta_dtype]

    @property
    def adapters_offset(self) -> int:
        """Offset of the rows' adapter numbers (int32) in a request slot."""
        return HEADER_BYTES

    @property
    def experts_offset(self) -> int:
        """Offset of the rows' expert numbers (int32) in a request slot."""
        return _up(self.adapters_offset + 4 * self.max_rows, _LINE)

    @property
    def rows_offset(self) -> int:
        """Offset of the rows in a request slot."""
        return _up(self.experts_offset + 4 * self.max_rows, _LINE)

    def result_offsets(self, site: int) -> tuple[int, ...]:
        """Offsets of the results of a site's outputs in a response slot."""
        offsets, at = [], HEADER_BYTES
        for width in self.sites[site].d_outs:
            offsets.append(at)
            at = _up(at + self.max_rows * width * self.result_dtype.itemsize, _LINE)
        return tuple(offsets)

    def request_bytes(self, site: int, rows: int) -> int:
        """Payload of a request of `rows` rows."""
        return rows * (8 + self.sites[site].d_in * self.row_dtype.itemsize)

    def response_bytes(self, site: int, rows: int) -> int:
        """Payload of a response of `rows` rows."""
        return rows * sum(self.sites[site].d_outs) * self.result_dtype.itemsize

    @property
    def request_slot(self) -> int:
        """Bytes of a request slot, whole pages."""
        widest = max(site.d_in for site in self.sites)
        return _up(self.rows_offset + self.max_rows * widest * self.row_dtype.itemsize, PAGE)

    @property
    def response_slot(self) -> int:
        """Bytes of a response slot, whole pages."""
        ends = (
            self.result_offsets(index)[-1]
            + self.max_rows * site.d_outs[-1] * self.result_dtype.itemsize
            for index, site in enumerate(self.sites)
        )
        return _up(max(ends), PAGE)

    @property
    def channel_bytes(self) -> int:
        """Bytes of one channel: a page of counters, the request slot, the response slot."""
        return PAGE + self.request_slot + self.response_slot


def moe_shapes(
    layers: int,
    max_rows: int,
    hidden: int,
    width: int,
    dtype: str,
    delta_dtype: str = "float32",
    attention: tuple[int, int] | None = None,
) -> Shapes:
    """Return the shapes of a model whose expert LoRA is remote: sites GATE_UP and DOWN.

    GATE_UP sends [rows, hidden] and brings gate and up, [rows, width] each; DOWN sends
    [rows, width] and brings [rows, hidden]. With the widths of q and of k and v in `attention`, so
    is that of attention: QKV brings q, k and v of [rows, hidden], OUT [rows, hidden] of [rows, q].
    """
    sites = (Site("gate_up", hidden, (width, width)), Site("down", width, (hidden,)))
    if attention is not None:
        q, kv = attention
        sites += (Site("qkv", hidden, (q, kv, kv)), Site("out", q, (hidden,)))
    return Shapes(layers, max_rows, dtype, delta_dtype, sites)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
