"""Adapter slots on the device: pools of rank rows and one table that says who owns which rows.

A rank-r matrix is r rows: A [r, d_in] is r rows of width d_in, and B is kept transposed as r rows
of width d_out. All rows of one width, of every module, layer and adapter, live in one pool, so an
adapter takes exactly the rows its true ranks need (S-LoRA's unified pool of rank vectors).
`AdapterSlots.entries` maps (module, layer, slot) to rows. The step reads both; loading returns new
ones and donates the old.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.gains import is_gain
from lora_jax.adapters.lora_allocator import LoraPlacement
from lora_jax.adapters.slot_sizes import SlotsSpec as SlotsSpec
from lora_jax.adapters.slot_sizes import rows_per_adapter as rows_per_adapter
from lora_jax.adapters.slot_sizes import saved_rows as saved_rows
from lora_jax.adapters.slot_sizes import size_slots as size_slots
from lora_jax.adapters.vocabulary import PARTS, most_tokens
from lora_jax.rank_rows import stored_width
from lora_jax.sharding import Split, put
from lora_jax.typing import Array, Float, Int, Num

# Columns of AdapterSlots.entries.
A_OFFSET, B_OFFSET, RANK, A_STRIDE, B_STRIDE = range(5)

_CHUNK_BYTES = 1 << 20  # of one row write: small next to a step, large next to a dispatch
_CHUNK_ROWS = 512  # narrow rows cost by count, not by bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterSlots:
    """Every resident adapter.

    Expert e of a site uses rows [a_offset + e * a_stride, + rank) of pools[d_in] and
    [b_offset + e * b_stride, + rank) of pools[d_out]; a stride of 0 shares one matrix between all
    experts. Rank 0 means the slot does not touch the site. `scaling` is alpha / rank (or
    alpha / sqrt(rank)). In a split model widths and experts are those of one device, and a pool is
    the rows of all devices, one after the other; within a step each device has its own. Rows in 8
    bits have 16 more items than their width (lora_jax.rank_rows).

    `token_ids` are the tokens whose rows of the embedding, and of the head, an adapter brings, -1
    for none; without them no trace of what adapters may have beside LoRA is in a program.
    """

    pools: dict[str, Num[Array, "rows items"]]  # key: str(width)
    entries: Int[Array, "modules layers slots 5"]  # modules in the order of catalogue.module_names
    scaling: Float[Array, "modules layers slots"]
    token_ids: Int[Array, "2 slots tokens"] | None = None

    @property
    def num_slots(self) -> int:
        """Adapters that there is room for at a time."""
        return self.entries.shape[2]

    @property
    def plain(self) -> "AdapterSlots":
        """The slots as steps take them in which no row's adapter brings more than LoRA."""
        return self if self.token_ids is None else dataclasses.replace(self, token_ids=None)


def init_slots(
    catalogue: LoraCatalogue,
    spec: SlotsSpec,
    dtype: jnp.dtype,
    split: Split | None = None,
    rows: dict[str, Array] | None = None,
) -> AdapterSlots:
    """Return empty slots: no adapter anywhere. With int8 rows are in 8 bits.

    With a split, spec and catalogue are a device's. `rows` are pools that exist already.
    """
    tokens = most_tokens(catalogue)
    brings = tokens or catalogue.most_saved or any(map(is_gain, catalogue.modules))
    ids = jnp.full((len(PARTS), spec.num_slots, tokens), -1, jnp.int32) if brings else None
    shape = (len(catalogue.modules), catalogue.num_layers, spec.num_slots)
    parts, by_rows, whole = (1, None, None)
    if split is not None:
        parts, by_rows, whole = split.size, split.rows, split.whole

    def make() -> AdapterSlots:
        return AdapterSlots(
            pools={
                str(w): jnp.zeros((parts * n, stored_width(w, dtype)), dtype, device=by_rows)
                for w, n in sorted(spec.rows.items() if rows is None else ())
            },
            entries=jnp.zeros((*shape, 5), jnp.int32, device=whole),
            scaling=jnp.zeros(shape, jnp.float32, device=whole),
            token_ids=ids,
        )

    slots = make() if split is not None else jax.jit(make)()  # one program in place of many
    return slots if rows is None else dataclasses.replace(slots, pools=rows)


@functools.partial(jax.jit, donate_argnums=0)
def write_rows(
    pool: Num[Array, "rows items"],
    indices: Int[Array, "chunk"],
    values: Num[Array, "chunk items"],
) -> Num[Array, "rows items"]:
    """Return the pool with values[i] at row indices[i]; an index out of range is dropped.

    The chunk is padded to one fixed length, so that loading never compiles after warm-up.
    """
    return pool.at[indices].set(values, mode="drop", unique_indices=True)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def _write_parts(
    pool: Num[Array, "rows items"],
    indices: Int[Array, "chunk"],
    values: Num[Array, "values items"],
    sharding: NamedSharding,
) -> Num[Array, "rows items"]:
    """Return the pool with a chunk written on each device, as write_rows does on one.

    `values` are the chunks of all devices, and the indices those of a device's own rows.
    """
    rows = sharding.spec
    write = jax.shard_map(
        write_rows,
        mesh=sharding.mesh,
        in_specs=(rows, PartitionSpec(), rows),
        out_specs=rows,
        check_vma=False,
    )
    return write(pool, indices, values)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def write_slot(
    entries: Int[Array, "modules layers slots 5"],
    scaling: Float[Array, "modules layers slots"],
    slot: Int[Array, ""],
    slot_entries: Int[Array, "modules layers 5"],
    slot_scaling: Float[Array, "modules layers"],
) -> tuple[Int[Array, "modules layers slots 5"], Float[Array, "modules layers slots"]]:
    """Return the table with one slot overwritten; zeros empty it."""
    return entries.at[:, :, slot].set(slot_entries), scaling.at[:, :, slot].set(slot_scaling)


@functools.partial(jax.jit, donate_argnums=0)
def _write_ids(
    token_ids: Int[Array, "2 slots tokens"], slot: Int[Array, ""], ids: Int[Array, "2 tokens"]
) -> Int[Array, "2 slots tokens"]:
    """Return the tokens of all slots with those of one overwritten."""
    return token_ids.at[:, slot].set(ids)


def chunk_rows(width: int, itemsize: int) -> int:
    """Return how many rows of this width one write carries."""
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // (width * itemsize)))


# What writes rank rows: programs (LoraLoadJob), a copier beside them (LoraCopyJob), or the memory
# of a page pool.
type RowWriter = Literal["programs", "copier", "pool"]


def warm_up(slots: AdapterSlots, *, rows: RowWriter = "programs") -> AdapterSlots:
    """Return `slots` unchanged (donated) after compiling every write that loading will make."""
    if rows == "programs":
        pools = {key: written(pool, *empty_chunk(pool)) for key, pool in slots.pools.items()}
        slots = dataclasses.replace(slots, pools=pools)
    elif rows == "copier":
        slots, _ = fenced(slots)
    return set_slot(slots, slots.num_slots)  # out of range: written nowhere


def fenced(slots: AdapterSlots) -> tuple[AdapterSlots, Int[Array, ""]]:
    """Return `slots` unchanged (donated), and what is ready when no earlier program reads them.

    Nothing but the order of programs is in it: no byte is copied, neither from the host nor here.
    """
    pools, mark = _passed_on(slots.pools)
    return dataclasses.replace(slots, pools=pools), mark


@functools.partial(jax.jit, donate_argnums=0)
def _passed_on(
    pools: dict[str, Num[Array, "_ _"]],
) -> tuple[dict[str, Num[Array, "_ _"]], Int[Array, ""]]:
    return pools, jnp.zeros((), jnp.int32)


def publish(slots: AdapterSlots, placement: LoraPlacement) -> AdapterSlots:
    """Return `slots` (donated) with the placement's entries of the table: it is usable now."""
    where = placement.slot, placement.entries, placement.scaling
    return set_slot(slots, *where, token_ids=placement.token_ids)


def clear_slots(slots: AdapterSlots, cleared: tuple[int, ...]) -> AdapterSlots:
    """Return `slots` (donated) with the table entries of these slots zeroed."""
    for slot in cleared:
        slots = set_slot(slots, slot)
    return slots


def set_slot(
    slots: AdapterSlots,
    slot: int,
    slot_entries: np.ndarray | None = None,
    slot_scaling: np.ndarray | None = None,
    token_ids: np.ndarray | None = None,
) -> AdapterSlots:
    """Return `slots` (donated) with a slot's entries of the table, which by default are empty."""
    modules, layers = slots.entries.shape[:2]
    if slot_entries is None or slot_scaling is None:
        slot_entries = np.zeros((modules, layers, 5), np.int32)
        slot_scaling = np.zeros((modules, layers), np.float32)
    entries, scaling = write_slot(
        slots.entries, slots.scaling, np.int32(slot), slot_entries, slot_scaling
    )
    ids = slots.token_ids
    if ids is not None and ids.size:
        token_ids = np.full(ids.shape[::2], -1, np.int32) if token_ids is None else token_ids
        ids = _write_ids(ids, np.int32(slot), token_ids)
    return dataclasses.replace(slots, entries=entries, scaling=scaling, token_ids=ids)


def written(pool: jax.Array, indices: np.ndarray, values: np.ndarray) -> jax.Array:
    """Return the pool (donated) with a chunk of the host's rows, on each device its own."""
    if _num_parts(pool) == 1:
        return write_rows(pool, indices, values)
    return _write_parts(pool, indices, put(values, pool.sharding), pool.sharding)


def _num_parts(pool: jax.Array) -> int:
    """Return how many devices share the rows of a pool."""
    return len(pool.sharding.device_set)


def chunk_shape(pool: jax.Array) -> tuple[int, int]:
    """Return rows and items of one write to a pool."""
    return chunk_rows(pool.shape[1], pool.dtype.itemsize), pool.shape[1]


def empty_chunk(pool: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return indices that are all out of range, each of its own, and zero values."""
    (size, width), parts = chunk_shape(pool), _num_parts(pool)
    first = pool.shape[0] // parts
    indices = np.arange(first, first + size, dtype=np.int32)
    return indices, np.zeros((parts * size, width), pool.dtype)
