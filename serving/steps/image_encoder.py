"""Images on the device: the tower's programs, the encoder cache, and which token takes which row.

A tower runs between two steps, each image alone in a bucket of patches, and writes the rows of the
encoder cache that the scheduler chose. On a CPU one program computes several small images of one
grid, each with the bits that it has alone. A step reads the rows through a table with, for every
position of every sequence row, the encoder row (-1: text) and the three positions of M-RoPE.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.config import ModelConfig
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vision import AbstractTower, TowerInputs
from lora_jax.sharding import Split
from lora_jax.typing import Array, Float, Int
from lora_jax.vision import layout
from lora_jax.vision.processor import Patches, ProcessorSettings
from lora_jax.vision.rope_positions import rope_positions
from lora_jax.vision.sizes import most_cells
from serving.api.images import EncodeImage
from serving.api.request import Sequence as RunningSequence
from serving.steps.compiling import compile_all
from serving.steps.device_stopwatch import DeviceStopwatch
from serving.steps.split_step import encode_on_every_device

ENCODER_ROW, POSITIONS = 0, slice(1, 4)  # of the table's second axis
TABLE_WIDTH = 4
# Images of the smallest bucket that one program computes, and how few others compute one by one.
_SEVERAL, _FEW = 8, 3
_KEPT_SIZES = 8  # sizes of images whose arrays stay on the device, and prompts' places of images


class ImageOperands(NamedTuple):
    """A step's view of images; only the encoder and admissions change it."""

    rows: Float[Array, "encoder_rows parts hidden"]
    places: Int[Array, "seqs 4 max_len"]


class TowerWork(NamedTuple):
    """An image for the tower: its patches, the cache's rows that it goes to, its LoRA's slot."""

    patches: Patches
    rows: tuple[int, ...]
    slot: int


class ImageEncoder:
    """The tower of one model and its cache; the runner's thread uses it."""

    def __init__(
        self,
        tower: AbstractTower,
        config: ModelConfig,
        settings: ProcessorSettings,
        module_names: tuple[str, ...],
        *,
        num_rows: int,
        max_image_tokens: int,
        max_rank: int,
        split: Split | None = None,
    ):
        """`num_rows` is the size of the cache; no image is larger than `max_image_tokens`.

        With `split` every device has the whole tower, and computes every image.
        """
        self._config, self._tower_config = config, config.tower
        self._num_rows, self._values = num_rows, settings.values
        graphdef, state = nnx.split(tower, graph=False)
        self._leaves, treedef = jax.tree.flatten(state)
        self._dtype = self._leaves[0].dtype
        most = _most_patches(settings, config, max_image_tokens)
        self.buckets = layout.buckets(config.tower, most)
        self._encode = _jit_encode(graphdef, treedef, module_names, max_rank, split)
        # Without adapters a GPU computes a map and what follows it in one launch.
        self._has_plain = jax.default_backend() == "gpu"
        # Larger images fill the cores of a CPU alone.
        on_cpu = jax.default_backend() == "cpu" and split is None
        self._several = _SEVERAL if on_cpu and tower.takes_several else 1
        self.stopwatch = DeviceStopwatch()  # of the tower
        # Frames of one size need their arrays but the patches on the device once.
        self._places = functools.lru_cache(_KEPT_SIZES)(self._place)
        self._positions = functools.lru_cache(_KEPT_SIZES)(self._table)
        self._written: dict[int, Any] = {}  # what each row of the table was made of

    def start(self, max_seqs: int, max_len: int, sharding: Any) -> None:
        """Make the cache and the table on the device."""
        parts = 1 + len(self._tower_config.deepstack)
        shape = (self._num_rows, parts, self._tower_config.out_size)
        place = functools.partial(jax.device_put, device=sharding)
        self._sharding = sharding
        self.operands = ImageOperands(
            place(jnp.zeros(shape, self._dtype)),
            place(jnp.full((max_seqs, TABLE_WIDTH, max_len), -1, jnp.int32)),
        )

    def warm_up(self, slots: AdapterSlots | None) -> None:
        """Compile every program and run it on nothing."""
        size = self._tower_config.patch_size
        none = Patches(np.zeros((0, 3 * size * size), np.uint8), (0, 0))
        with_slots = (-1, 0) if slots is not None and self._has_plain else (-1,)
        several = [(self.buckets[0], self._several)] if self._several > 1 else []
        programs = [*((bucket, 1) for bucket in self.buckets), *several]
        jobs = [
            ([TowerWork(none, (), slot)], *program, slots)
            for program in programs
            for slot in with_slots
        ]
        # A call finds what was lowered from arguments like its own. A GPU times kernels while it
        # compiles, one program at a time.
        if not self._has_plain:
            lowered = [self._encode.lower(*self._arguments(*job)) for job in jobs]
            names = [f"{images} x {bucket} patches" for _, bucket, images, _ in jobs]
            compile_all(lowered, names, progress=False)
        for job in jobs:
            self._run(*job)
        self._set_places(0, np.full(self.operands.places.shape[1:], -1, np.int32))
        self._written.clear()

    def admit(self, sequence: RunningSequence) -> None:
        """Write the table of a sequence that has a new row, where it differs from the last one's.

        Sequences of text, and those whose images' tokens are cached, differ by images' sizes alone.
        """
        images = sequence.request.images
        grids = tuple([(image.start, image.image.grid) for image in images])
        written = grids, tuple(sequence.image_rows)
        if self._written.get(sequence.row) == written:
            return
        places = self._positions(grids).copy()
        for image, rows in zip(images, sequence.image_rows, strict=True):
            if rows:
                places[ENCODER_ROW, image.start : image.end] = rows
        self._set_places(sequence.row, places)
        self._written[sequence.row] = written

    def encode(self, works: Sequence[EncodeImage], slots: AdapterSlots | None) -> None:
        """Have the tower compute images, each with the LoRA of its slot (-1: none).

        `rows` of each are the cache's rows that its output goes to. Returns at once.
        """
        for grid, group in self._groups(works):
            needed = layout.tower_patches(self._tower_config, grid)
            bucket = next(bucket for bucket in self.buckets if bucket >= needed)
            images = self._several if len(group) > 1 else 1
            self.stopwatch.add(*self._run(group, bucket, images, slots), len(group))

    def _groups(
        self, works: Sequence[EncodeImage]
    ) -> Iterator[tuple[tuple[int, int], list[TowerWork]]]:
        """Yield what goes into a program each: several small images of a grid, or one."""
        by_grid: dict[tuple[int, int], list[TowerWork]] = {}
        for work in works:
            patches = TowerWork(work.image.patches, work.rows, work.slot)
            by_grid.setdefault(work.image.grid, []).append(patches)
        for grid, group in by_grid.items():
            fits = layout.tower_patches(self._tower_config, grid) <= self.buckets[0]
            for first in range(0, len(group), self._several):
                some = group[first : first + self._several]
                if fits and len(some) > _FEW:
                    yield grid, some
                else:
                    yield from ((grid, [one]) for one in some)

    def wait(self) -> None:
        """Wait until everything has run."""
        jax.block_until_ready(self.operands)

    def close(self) -> None:
        """Let go of the tower and of all arrays; no other call follows."""
        del self._leaves, self._encode, self._places, self._positions, self.operands

    def _set_places(self, row: int, places: np.ndarray) -> None:
        table = _write_places(self.operands.places, np.int32(row), places)
        self.operands = self.operands._replace(places=table)

    def _table(self, grids: tuple[tuple[int, tuple[int, int]], ...]) -> np.ndarray:
        """Return the table of a sequence with images of these starts and grids, without rows."""
        length = self.operands.places.shape[2]
        places = np.full((TABLE_WIDTH, length), -1, np.int32)
        has_sections = self._config.rope.sections is not None
        places[POSITIONS] = rope_positions(self._tower_config, has_sections, grids, length)
        return places

    def _run(
        self, works: Sequence[TowerWork], bucket: int, images: int, slots: AdapterSlots | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return what is there before the tower begins, and what is there when it ends."""
        before = _mark(self.operands.places)
        done, after = self._encode(*self._arguments(works, bucket, images, slots))
        self.operands = self.operands._replace(rows=done)
        return before, after

    def _arguments(
        self, works: Sequence[TowerWork], bucket: int, images: int, slots: AdapterSlots | None
    ) -> tuple[Any, ...]:
        """Return what the tower's program for so many images takes; it donates the cache."""
        grid, patches = works[0].patches.grid, []
        image_to_slot = np.full(images, -1, np.int32)
        # Rows of padding go to distinct places past the end and are dropped.
        cells = layout.bucket_cells(self._tower_config, bucket)
        targets = self._num_rows + np.arange(images * cells, dtype=np.int32)
        for number, (of_image, rows, slot) in enumerate(works):
            patches += layout.arrange(self._tower_config, of_image, bucket).patches
            image_to_slot[number] = slot
            targets[number * cells : number * cells + len(rows)] = rows
        inputs = self._places(grid, bucket, images)
        if images > 1:  # places past the last image are not read
            patches += patches[:1] * (images - len(works))
            inputs = {**inputs, "num_patches": np.array(len(works) * bucket, np.int32)}
        inputs = {**inputs, "patches": tuple(patches)}
        has_none = self._has_plain and (image_to_slot < 0).all()
        adapters, tree = jax.tree.flatten(None if has_none else slots)
        given = (self._leaves, self.operands.rows, inputs, adapters)
        return *given, image_to_slot, targets, tree

    def _place(self, grid: tuple[int, int], bucket: int, images: int) -> dict[str, Array]:
        """Return the arrays of images of a grid, all but their patches, on the device."""
        none = Patches(np.zeros((grid[0] * grid[1], 0), np.uint8), grid)
        arrays = layout.several(layout.arrange(self._tower_config, none, bucket), images)
        of_grid = vars(arrays) | {"values": self._values}
        del of_grid["patches"]
        return jax.device_put(of_grid, self._sharding)


def _most_patches(settings: ProcessorSettings, config: ModelConfig, max_tokens: int) -> int:
    """Return the most patches that a tower may have to compute."""
    side = settings.patch_size * config.tower.merge_size
    cells = most_cells(side, settings.min_pixels, settings.max_pixels)
    return layout.most_patches(config.tower, min(max_tokens, cells))


def _jit_encode(
    graphdef: Any, treedef: Any, names: tuple[str, ...], max_rank: int, split: Split | None
) -> Any:
    """Return the tower's program: everything goes in as leaves, the cache is donated."""

    @functools.partial(jax.jit, static_argnames="adapters_tree", donate_argnums=1)
    def encode(leaves, cache, inputs, adapters, image_to_slot, targets, adapters_tree):
        local = functools.partial(encode_here, adapters_tree=adapters_tree)
        if split is not None:
            local = encode_on_every_device(local, adapters_tree, split)
        return local(leaves, cache, inputs, adapters, image_to_slot, targets)

    def encode_here(leaves, cache, inputs, adapters, image_to_slot, targets, *, adapters_tree):
        tower = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        slots = jax.tree.unflatten(adapters_tree, adapters)
        patches, images = jnp.concatenate(inputs["patches"]), image_to_slot.shape[0]
        whole = TowerInputs(**inputs | {"patches": patches, "images": images})
        row_to_slot = jnp.repeat(image_to_slot, patches.shape[0] // images)
        routing = AdapterRouting(whole.num_patches, row_to_slot, slots, names, max_rank)
        rows = tower(whole, routing.with_items())
        rows = rows.astype(cache.dtype)
        done = cache.at[targets].set(rows, mode="drop", unique_indices=True)
        return done, rows[0, 0, 0]

    return encode


@jax.jit
def _mark(places: Int[Array, "seqs 4 max_len"]) -> Int[Array, ""]:
    """Return a number that a device has when all before it is done."""
    return places[0, 0, 0]


@functools.partial(jax.jit, donate_argnums=0)
def _write_places(
    table: Int[Array, "seqs 4 max_len"], row: Int[Array, ""], places: Int[Array, "4 max_len"]
) -> Int[Array, "seqs 4 max_len"]:
    return jax.lax.dynamic_update_index_in_dim(table, places, row, 0)
