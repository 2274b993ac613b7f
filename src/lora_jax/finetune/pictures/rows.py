"""Examples with images as rows of tokens: what a server makes of the same request."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.batch import ImageRows
from lora_jax.config import ModelConfig
from lora_jax.finetune.documents import TextFormat
from lora_jax.finetune.lora_params import LoraDelta
from lora_jax.finetune.pictures.tasks import Example
from lora_jax.finetune.pictures.tower import tower_rows
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float, Int, Shaped
from lora_jax.vision.layout import num_tokens
from lora_jax.vision.processor import ProcessorSettings, preprocess
from lora_jax.vision.rope_positions import rope_positions

PAD = "<|image_pad|>"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PictureBatch:
    """Examples on the device, one a row. Padding stands at the end and weighs 0."""

    tokens: Int[Array, "rows length"]
    targets: Int[Array, "rows length"]
    weights: Float[Array, "rows length"]
    last: Int[Array, "rows"]  # place of the prompt's last token
    rope_positions: Int[Array, "rows 3 length"]
    token_to_cell: Int[Array, "rows length"]  # of the row's own images; -1: text
    pixels: Shaped[Array, "rows images patches patch_pixels"] | None
    cells: Float[Array, "rows cells parts hidden"] | None  # made before, where no tower is trained
    wanted: Any  # labels of each row, for a head


@dataclasses.dataclass(frozen=True, eq=False)
class PictureRows:
    """All examples of a task on the host; the fields are those of `PictureBatch`."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    last: np.ndarray
    rope_positions: np.ndarray
    token_to_cell: np.ndarray
    pixels: np.ndarray | None
    cells: np.ndarray | None
    wanted: Any
    grid: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def take(self, indices: Int[np.ndarray, "chosen"]) -> PictureBatch:
        """Return the rows at `indices` on the device."""
        names = [field.name for field in dataclasses.fields(PictureBatch)]
        return PictureBatch(
            **{
                name: jax.tree.map(lambda a: jnp.asarray(a[indices]), getattr(self, name))
                for name in names
            }
        )


def first_rows(rows: PictureRows, count: int) -> PictureRows:
    """Return the first `count` rows, which have no labels."""
    names = [field.name for field in dataclasses.fields(PictureBatch)]
    cut = {n: None if getattr(rows, n) is None else getattr(rows, n)[:count] for n in names}
    return dataclasses.replace(rows, **cut)


def picture_rows(
    examples: Sequence[Example],
    form: TextFormat,
    config: ModelConfig,
    settings: ProcessorSettings,
    *,
    wanted: Any = None,
    length: int | None = None,
) -> PictureRows:
    """Return one row per example; every example has as many images as the first.

    Targets that count are the answer's. Raises ValueError for rows longer than `length`.
    """
    tower, made = config.tower, [_row(e, form, config, settings) for e in examples]
    most = max(len(tokens) for tokens, _, _ in made) - 1
    size = most if length is None else length
    if most > size:
        raise ValueError(f"an example has {most} tokens; {size} are allowed")
    patches = [[preprocess(image, settings) for image in e.images] for e in examples]
    grid, count = patches[0][0].grid, len(made)
    out = PictureRows(
        tokens=np.zeros((count, size), np.int32),
        targets=np.zeros((count, size), np.int32),
        weights=np.zeros((count, size), np.float32),
        last=np.array([num_prompt - 1 for _, num_prompt, _ in made], np.int32),
        rope_positions=np.zeros((count, 3, size), np.int32),
        token_to_cell=np.full((count, size), -1, np.int32),
        pixels=np.stack([np.stack([p.pixels for p in images]) for images in patches]),
        cells=None,
        wanted=wanted,
        grid=grid,
    )
    cells = num_tokens(tower, grid)
    for row, (tokens, num_prompt, starts) in enumerate(made):
        end = len(tokens) - 1
        out.tokens[row, :end], out.targets[row, :end] = tokens[:-1], tokens[1:]
        out.weights[row, num_prompt - 1 : end] = 1.0
        placed = [(start, grid) for start in starts]
        out.rope_positions[row] = rope_positions(tower, True, placed, size)
        for number, start in enumerate(starts):
            at = np.arange(cells)
            out.token_to_cell[row, start + at] = number * cells + at
    return out


def joined(several: Sequence[PictureRows]) -> PictureRows:
    """Return all rows of several that have one grid and no labels, as long as the longest."""
    arrays: dict[str, Any] = {"grid": several[0].grid}
    for field in dataclasses.fields(PictureBatch):
        values = [getattr(rows, field.name) for rows in several]
        fill = -1 if field.name == "token_to_cell" else 0
        arrays[field.name] = None if values[0] is None else _stacked(values, fill)
    return PictureRows(**arrays)


def _stacked(values: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """Return the rows of all arrays, each filled up at its ends to the largest shape of a row."""
    shape = np.max([value.shape[1:] for value in values], axis=0, initial=0).astype(int)
    widths = [
        [(0, 0), *((0, m - n) for n, m in zip(v.shape[1:], shape, strict=True))] for v in values
    ]
    pairs = zip(values, widths, strict=True)
    return np.concatenate([np.pad(v, width, constant_values=fill) for v, width in pairs])


def _row(
    example: Example, form: TextFormat, config: ModelConfig, settings: ProcessorSettings
) -> tuple[list[int], int, list[int]]:
    """Return all tokens of prompt and answer, how many are the prompt's, where images start."""
    parts = [{"type": "image"}] * len(example.images) + [{"type": "text", "text": example.prompt}]
    document = form.exchange(parts, example.answer)
    cells = num_tokens(config.tower, settings.grid_of(*example.images[0].shape[:2]))
    tokens: list[int] = []
    starts: list[int] = []
    for token in document.tokens:
        if token == config.tower.image_token_id:
            starts.append(len(tokens))
            tokens += [token] * cells
        else:
            tokens.append(token)
    return tokens, document.num_prompt + len(starts) * (cells - 1), starts


def image_rows_of(
    model: AbstractCausalLM,
    batch: PictureBatch,
    values: Float[Array, "3 256"],
    grid: tuple[int, int],
    lora: LoraDelta | None,
) -> ImageRows:
    """Return the images of a batch for the language model, from the tower where none are made."""
    count = batch.tokens.shape[0]
    if batch.cells is None:
        assert batch.pixels is not None
        pixels = batch.pixels.reshape(-1, *batch.pixels.shape[2:])
        rows = tower_rows(cast(Any, model).tower, pixels, values, grid, lora)
    else:
        rows = batch.cells.reshape(-1, *batch.cells.shape[2:])
    first = jnp.arange(count, dtype=jnp.int32)[:, None] * (rows.shape[0] // count)
    chosen = jnp.where(batch.token_to_cell < 0, -1, batch.token_to_cell + first)
    three = batch.rope_positions.transpose(1, 0, 2).reshape(3, -1)
    return ImageRows(rows, chosen.reshape(-1), three)


def with_cells(
    model: AbstractCausalLM, rows: PictureRows, settings: ProcessorSettings, batch: int = 64
) -> PictureRows:
    """Return the rows with what the tower makes of their images, for training that leaves it."""
    graphdef, state = nnx.split(model, graph=False)
    values = jnp.asarray(settings.values)

    @jax.jit
    def cells_of(state: Any, pixels: Array) -> Array:
        tower = cast(Any, nnx.merge(graphdef, state)).tower
        return tower_rows(tower, pixels, values, rows.grid)

    assert rows.pixels is not None
    count, images = rows.pixels.shape[:2]
    flat = rows.pixels.reshape(-1, *rows.pixels.shape[2:])
    made = []
    for start in range(0, len(flat), batch):
        part = flat[start : start + batch]
        padded = np.concatenate([part, np.zeros((batch - len(part), *part.shape[1:]), np.uint8)])
        cells = np.asarray(cells_of(state, jnp.asarray(padded)), np.float32)
        made.append(cells.reshape(batch, -1, *cells.shape[1:])[: len(part)])
    every = np.concatenate(made)
    return dataclasses.replace(
        rows, pixels=None, cells=every.reshape(count, images * every.shape[1], *every.shape[2:])
    )
