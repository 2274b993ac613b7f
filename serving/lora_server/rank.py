"""Rank of a LoRA Server: adapter slots of its shard, and their deltas.

Instances name an adapter by a number that is the same on all ranks and never given twice: number
modulo `num_adapters` is a place, so that a rank knows from one small table where a number's rows
are, and a request made before a place changed hands is found out, not answered with another
adapter's deltas.
"""

import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.row_copies import Copier, pin_matrices
from lora_jax.adapters.slots import (
    AdapterSlots,
    clear_slots,
    init_slots,
    size_slots,
    warm_up,
)
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.ops.adapter_items import adapter_items
from lora_jax.ops.lora_gemm import lora_gemms
from lora_jax.typing import Array, Float, Int
from serving.lora_server.loading import LayerwiseLoad
from serving.lora_server.shards import AbstractShard
from serving.lora_server.transport.device_server import MOST_MESSAGES, Share

_SMALLEST_BUCKET, _BUCKET_FACTOR = 8, 4
_FREE = -1
_MOST_SLOTS = 65535  # of one table: what the kernels of ops.lora_gemm take


@dataclasses.dataclass(frozen=True)
class RankSizes:
    """Sizes of one rank, the same on all of a server."""

    num_adapters: int
    max_rank: int
    max_rows: int  # of one request
    byte_budget: int | None = None  # of rank rows; None: num_adapters of max_rank
    layerwise: bool = True  # an adapter may be used from its first layer on
    int8_rows: bool = False  # rank rows are in 8 bits

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts that programs are compiled for."""
        buckets, bucket = [], _SMALLEST_BUCKET
        while bucket < self.max_rows:
            buckets.append(bucket)
            bucket *= _BUCKET_FACTOR
        return (*buckets, self.max_rows)


class ServerRank:
    """The device side of one rank; one thread uses it."""

    def __init__(
        self,
        catalogue: LoraCatalogue,
        shard: AbstractShard,
        sizes: RankSizes,
        dtype: jnp.dtype,
        *,
        implementation: str | None = None,
        copier: Copier | None = None,
    ):
        """`catalogue` is the whole base model's, `implementation` that of ops.lora_gemm, None the
        fastest. With a `copier` the host copies rows to the device. Raises ValueError when no
        adapter would fit.
        """
        self._implementation, self._copier = implementation, copier
        self.shard, self.sizes, self.dtype = shard, sizes, jnp.dtype(dtype)
        self._modules_of = shard.sites
        self._catalogue = local = shard.catalogue(catalogue)
        rows = jnp.dtype(jnp.int8) if sizes.int8_rows else self.dtype
        spec = size_slots(
            local, sizes.num_adapters, sizes.max_rank, rows.itemsize, sizes.byte_budget
        )
        self._allocator = SlotAllocator(local, spec.num_slots, spec.rows, rows.itemsize)
        # Committed from the start, or every program would compile twice (see ModelRunner).
        device = jax.local_devices()[0]
        self.slots: AdapterSlots = jax.device_put(init_slots(local, spec, rows), device)
        self._loads: dict[int, LayerwiseLoad] = {}  # by number, oldest first
        self._failures: list[tuple[int, str]] = []
        self._digests: dict[int, str] = {}  # by number
        self._numbers = np.full(sizes.num_adapters, _FREE, np.int64)  # by place
        self._slots_of = np.full(sizes.num_adapters, _FREE, np.int32)  # by place
        self._num_ready = np.zeros(sizes.num_adapters, np.int32)  # layers, by place
        self.changes = 0  # of what `table` returns

    @property
    def most_messages(self) -> int:
        """Return how many messages, each of a layer of its own, `traced_deltas` takes at once."""
        _, layers, slots, _ = self.slots.entries.shape
        return MOST_MESSAGES if layers * slots <= _MOST_SLOTS else 1

    @property
    def share(self) -> Share:
        """Return what programs have to know of the rank besides its table."""
        per_layer = self.slots.entries.shape[2] if self.most_messages > 1 else 0
        return Share(self.shard.first_expert, self.shard.num_experts, per_layer)

    @property
    def is_loading(self) -> bool:
        """True if `advance` has anything to do."""
        return bool(self._loads)

    @property
    def held(self) -> dict[int, str]:
        """Digests of the known adapters by number; the last layers of some may be on their way."""
        return dict(self._digests)

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return copies of the numbers held, their slots and their layers here, by place."""
        return self._numbers.copy(), self._slots_of.copy(), self._num_ready.copy()

    @property
    def sites(self) -> tuple[int, ...]:
        """Adapter numbers that requests may use."""
        return tuple(self._modules_of)

    def width_in(self, site: int) -> int:
        """Return the width of a row that comes in."""
        return self._catalogue.modules[self._modules_of[site][0]].d_in

    def widths_out(self, site: int) -> tuple[int, ...]:
        """Return the width of each of a row's deltas."""
        return tuple(self._catalogue.modules[name].d_out for name in self._modules_of[site])

    def pin(self, part: AdapterWeights) -> AdapterWeights:
        """Return a part as the host keeps it; any thread may ask.

        Its rows are those of the slots, and load at the rate of the host's bus.
        """
        return pin_matrices(part.in_8_bits() if self.sizes.int8_rows else part, self._copier)

    def start_load(self, number: int, part: AdapterWeights) -> None:
        """Give this rank's part of an adapter (`shard_part`) room under `number`.

        Its layers are written by `advance`, lowest first. Raises ValueError, and then holds what it
        held, when the number's place is taken, when the adapter is held already, or when there is
        no room.
        """
        taken = {n % self.sizes.num_adapters for n in (*self._digests, *self._loads)}
        if number < 0 or number % self.sizes.num_adapters in taken:
            raise ValueError(f"The place of adapter number {number} is taken.")
        self._allocator.check_fits(part)
        placement = self._allocator.place(part, pinned=True)
        self._loads[number] = LayerwiseLoad(placement, part, self.slots, self._copier)

    def advance(self, max_chunks: int) -> int | None:
        """Write up to `max_chunks` of the oldest load; return its number if that made it known.

        It is known, and requests of it may come, from its first layer on; not `layerwise`, from
        its last. A load that fails before is dropped (`take_failures`). Raises LoadFailed for one
        that fails later: instances may use it, and only the end of this rank takes it from them.
        """
        if not self._loads:
            return None
        number, load = next(iter(self._loads.items()))
        index = number % self.sizes.num_adapters
        self.slots = load.advance(self.slots, max_chunks)
        if load.failure is not None:
            if number in self._digests:
                raise load.failure
            self._failures.append((number, str(load.failure)))
            del self._loads[number]  # no copy of it is under way
            self._allocator.abandon_loading(load.digest)
            self.slots = clear_slots(self.slots, self._allocator.take_cleared_slots())
            return None
        self.changes += int(self._num_ready[index] != load.num_ready or load.done)
        self._num_ready[index] = load.num_ready
        if load.done:
            del self._loads[number]
            self._allocator.finish_loading(load.digest)
        usable = load.num_ready if self.sizes.layerwise else load.done
        if not usable or number in self._digests:
            return None
        self._digests[number] = load.digest
        self._numbers[index], self._slots_of[index] = number, load.slot
        return number

    def must_wait(self, row_to_adapter: np.ndarray, layer: int) -> bool:
        """True if a layer of one of these adapters, all known, is still on its way."""
        return bool((self._num_ready[row_to_adapter % self.sizes.num_adapters] <= layer).any())

    def unload(self, number: int) -> None:
        """Hold `number` no more, or load it no further; an unknown number is left alone."""
        load, digest = self._loads.pop(number, None), self._digests.pop(number, None)
        if load is None and digest is None:
            return
        self.changes += 1
        if digest is not None:
            self._numbers[number % self.sizes.num_adapters] = _FREE
        if load is not None:
            if self._copier is not None:
                self._copier.finish_writes()  # its rows may be another's next
            self._allocator.abandon_loading(load.digest)
        elif digest is not None:
            self._allocator.retire(digest)
        self.slots = clear_slots(self.slots, self._allocator.take_cleared_slots())

    def take_failures(self) -> list[tuple[int, str]]:
        """Return, once, (number, why) of loads that failed and were dropped."""
        failures, self._failures = self._failures, []
        return failures

    def bucket(self, num_rows: int) -> int:
        """Return the rows of the program for a request; ValueError when no program is so large."""
        for bucket in self.sizes.buckets:
            if num_rows <= bucket:
                return bucket
        raise ValueError(f"A request of {num_rows} rows; at most {self.sizes.max_rows} fit.")

    def slots_of(self, row_to_adapter: np.ndarray, bucket: int) -> np.ndarray | None:
        """Return int32 [bucket], the slots of the rows' adapters and then -1.

        None when one of the adapters, which are numbers int32 [rows], is not held.
        """
        indices = row_to_adapter % self.sizes.num_adapters
        if not np.array_equal(self._numbers[indices], row_to_adapter):
            return None
        slots = np.full(bucket, _FREE, np.int32)
        slots[: len(indices)] = self._slots_of[indices]
        return slots

    def deltas(
        self,
        site: int,
        layer: int,
        x: np.ndarray,
        row_to_slot: np.ndarray,
        row_to_expert: np.ndarray,
    ) -> tuple[Float[Array, "rows _"], ...]:
        """Return what the adapters add to each output of the site, on its way on the device.

        `x` [rows, d_in] and the int32 vectors have as many rows as one of the buckets. `layer` and
        experts are numbers of the model; they must be the shard's where row_to_slot is not -1.
        """
        return self.traced_deltas(self.slots, site, np.int32(layer), x, row_to_slot, row_to_expert)

    def traced_deltas(
        self,
        slots: AdapterSlots,
        site: int,
        layer: Int[Array, ""] | np.int32 | None,
        x: Array | np.ndarray,
        row_to_slot: Array | np.ndarray,
        row_to_expert: Array | np.ndarray,
    ) -> tuple[Float[Array, "rows _"], ...]:
        """Return `deltas` with the adapters in `slots`; in a program too.

        Without a layer the slots of all layers are one table, and rows may be of different ones.
        """
        return shard_deltas(
            slots,
            layer,
            x,
            row_to_slot,
            row_to_expert,
            modules=tuple(
                self._catalogue.module_names.index(name) for name in self._modules_of[site]
            ),
            widths=self.widths_out(site),
            first_expert=self.shard.first_expert if self._of_experts(site) else None,
            max_rank=self.sizes.max_rank,
            implementation=self._implementation,
        )

    def _of_experts(self, site: int) -> bool:
        return self._catalogue.modules[self._modules_of[site][0]].num_experts > 0

    def warm_up(self) -> None:
        """Compile everything that loading and requests will run."""
        self.slots = warm_up(self.slots, rows="programs" if self._copier is None else "copier")
        cases = list(itertools.product(self.sites, self.sizes.buckets))
        with ThreadPoolExecutor(len(cases)) as pool:  # each takes seconds to compile on a GPU
            list(pool.map(self._compile, *zip(*cases, strict=True)))

    def _compile(self, site: int, bucket: int) -> None:
        x = np.zeros((bucket, self.width_in(site)), self.dtype)
        nobody = np.full(bucket, -1, np.int32)
        jax.block_until_ready(self.deltas(site, 0, x, nobody, nobody))

    def check_integrity(self) -> None:
        """Raise AssertionError when table, slots and allocator disagree."""
        self._allocator.check_integrity()
        loaded = {d for number, d in self._digests.items() if number not in self._loads}
        assert set(self._allocator.resident()) == loaded, "held but no slot"
        assert set(self._numbers) - {_FREE} == set(self._digests), "the table is another"
        for number, digest in self._digests.items():
            slot = self._slots_of[number % self.sizes.num_adapters]
            loading = self._loads.get(number)
            placed = self._allocator.slot_of(digest) if loading is None else loading.slot
            assert slot == placed, f"{number} is not in slot {slot}"


@functools.partial(
    jax.jit,
    static_argnames=("modules", "widths", "first_expert", "max_rank", "implementation"),
)
def shard_deltas(
    slots: AdapterSlots,
    layer: Int[Array, ""] | None,
    x: Float[Array, "rows d_in"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    *,
    modules: tuple[int, ...],
    widths: tuple[int, ...],
    first_expert: int | None,
    max_rank: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return scaling * (x A^T) B of each row for every module; of slot -1 it is zero.

    In ops.lora_gemm.delta_dtype, as a coupled engine's deltas of experts are: the instance's sum
    has the bits of that engine's. On a GPU it adds those of a dense map in bfloat16 unrounded, and
    these are rounded. The layer is data, so that one program serves them all; without it all
    layers' slots are one table. Without `first_expert` the modules are of no expert.
    """
    entries, scaling = slots.entries, slots.scaling
    if layer is None:
        entries, scaling = (t.reshape(len(t), -1, *t.shape[3:]) for t in (entries, scaling))
    else:
        entries, scaling = entries[:, layer], scaling[:, layer]
    options = {"max_rank": max_rank, "implementation": implementation}
    experts = None if first_expert is None else row_to_expert - first_expert
    if experts is None:
        options["items"] = adapter_items(row_to_slot, scaling.shape[1], max_rank=max_rank)
    deltas = []
    for width, group in itertools.groupby(zip(modules, widths, strict=True), lambda one: one[1]):
        sites = [module for module, _ in group]
        pools = slots.pools[str(x.shape[1])], slots.pools[str(width)]
        owners = row_to_slot, experts
        nothing = [None] * len(sites)
        deltas += lora_gemms(nothing, x, *pools, entries, scaling, sites, *owners, **options)
    return tuple(deltas)
