"""Images of 64 x 64 pixels drawn from real pictures: one alone, several in a scene, frames."""

import dataclasses

import numpy as np
from PIL import Image

from lora_jax.finetune.pictures.collect import Pictures

SIDE = 64  # pixels
PLACES = tuple(
    f"{row} {column}"
    for row in ("top", "middle", "bottom")
    for column in ("left", "centre", "right")
)
_GAP = 2  # pixels between two things
_TRIES = 40


@dataclasses.dataclass(frozen=True, eq=False)
class Thing:
    """A picture in a scene: its row in its source, and its box in pixels."""

    row: int
    box: tuple[int, int, int, int]  # left, top, right, bottom

    @property
    def place(self) -> str:
        """Place of its middle: one of PLACES."""
        left, top, right, bottom = self.box
        column, row = (min(2, 3 * (a + b) // (2 * SIDE)) for a, b in ((left, right), (top, bottom)))
        return PLACES[3 * row + column]


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """An image and what stands in it, from top to bottom and from left to right."""

    image: np.ndarray  # uint8 [SIDE, SIDE, 3]
    things: tuple[Thing, ...]


def background(rng: np.random.Generator) -> np.ndarray:
    """Return float32 [SIDE, SIDE, 3]: two colours, one running into the other, and some noise."""
    first, second = rng.uniform(20, 250, (2, 3)).astype(np.float32)
    if rng.random() < 0.5:
        second = first
    ramp = np.linspace(0, 1, SIDE, dtype=np.float32)
    ramp = ramp[:, None, None] if rng.random() < 0.5 else ramp[None, :, None]
    plain = np.broadcast_to(first + ramp * (second - first), (SIDE, SIDE, 3))
    noise = rng.standard_normal((SIDE, SIDE, 1), np.float32) * np.float32(rng.uniform(0, 6))
    return plain + noise


def paste(canvas: np.ndarray, picture: np.ndarray, left: int, top: int, size: int) -> None:
    """Draw an RGBA picture, or one of grey values, at size x size pixels on float32 pixels."""
    if picture.shape[2] == 1:
        grey = Image.fromarray(picture[..., 0]).resize((size, size), Image.Resampling.BICUBIC)
        canvas[top : top + size, left : left + size] = np.asarray(grey, np.float32)[..., None]
        return
    small = Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR)
    values = np.asarray(small, np.float32)
    cover = values[..., 3:] / np.float32(255)
    target = canvas[top : top + size, left : left + size]
    target += cover * (values[..., :3] - target)


def finished(canvas: np.ndarray) -> np.ndarray:
    """Return the pixels as uint8."""
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def alone(picture: np.ndarray, rng: np.random.Generator, *, least: int = 40) -> np.ndarray:
    """Return uint8 [SIDE, SIDE, 3]: one picture, at least `least` pixels wide, somewhere."""
    canvas = np.array(background(rng))
    size = int(rng.integers(least, SIDE + 1))
    left, top = rng.integers(0, SIDE - size + 1, 2)
    paste(canvas, picture, int(left), int(top), size)
    return finished(canvas)


def scene(
    source: Pictures, count: int, rng: np.random.Generator, sizes: tuple[int, int] = (16, 28)
) -> Scene:
    """Return up to `count` things of a source that do not touch; fewer where none fits."""
    canvas, things = np.array(background(rng)), []
    for row in rng.integers(0, len(source.names), count):
        box = _free(things, rng, sizes)
        if box is not None:
            paste(canvas, source.images[row], box[0], box[1], box[2] - box[0])
            things.append(Thing(int(row), box))
    things.sort(key=lambda thing: (PLACES.index(thing.place), thing.box))
    return Scene(finished(canvas), tuple(things))


def _free(
    things: list[Thing], rng: np.random.Generator, sizes: tuple[int, int]
) -> tuple[int, int, int, int] | None:
    """Return a box that touches no thing, None where none was found."""
    for _ in range(_TRIES):
        size = int(rng.integers(sizes[0], sizes[1] + 1))
        left, top = (int(x) for x in rng.integers(0, SIDE - size + 1, 2))
        box = (left, top, left + size, top + size)
        if all(_apart(box, thing.box) for thing in things):
            return box
    return None


def _apart(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    return any(
        one[axis] >= other[axis + 2] + _GAP or other[axis] >= one[axis + 2] + _GAP
        for axis in (0, 1)
    )


MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}


def frames(picture: np.ndarray, motion: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return uint8 [count, SIDE, SIDE, 3]: a picture that moves over one background."""
    size, step = int(rng.integers(18, 28)), int(rng.integers(3, 6))
    plain, way = background(rng), np.array(MOTIONS[motion])
    span = step * (count - 1)
    low = np.where(way < 0, span, 0)
    high = np.where(way > 0, SIDE - size - span, SIDE - size)
    start = rng.integers(low, np.maximum(high, low) + 1)
    out = []
    for number in range(count):
        canvas = np.array(plain)
        left, top = np.clip(start + number * step * way, 0, SIDE - size)
        paste(canvas, picture, int(left), int(top), size)
        out.append(finished(canvas))
    return np.stack(out)
