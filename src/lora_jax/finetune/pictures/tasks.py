"""Tasks on images: what the base learns, and what adapters learn, drawn from a seed.

A task is a function of the sources of one part and of random numbers.
"""

import dataclasses
import pathlib
import zlib
from collections.abc import Callable

import numpy as np

from lora_jax.finetune.pictures import scenes
from lora_jax.finetune.pictures.box_words import in_words
from lora_jax.finetune.pictures.collect import KINDS, Pictures, load

FRAMES = 6  # of a task on motion
MOST_THINGS = 5
NO_KIND = "none"
_COLLECT = "python -m lora_jax.finetune.pictures.collect"


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """Images, a prompt about them, and the answer in words, labels and boxes."""

    images: np.ndarray  # uint8 [images, 64, 64, 3]
    prompt: str
    answer: str
    labels: tuple[str, ...]
    boxes: tuple[tuple[str, tuple[float, ...]], ...] = ()  # label; left, top, right, bottom: 0 to 1


Sources = dict[str, Pictures]


def read_sources(folder: pathlib.Path) -> Sources:
    """Return the sources that `collect` wrote, those that are there; ValueError for none."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ValueError(f"{folder} has no pictures (*.npz); {_COLLECT} writes them.")
    return {path.stem: load(path) for path in files}


def check_sources(task: str, sources: Sources) -> None:
    """Raise ValueError naming the file that a task needs, where its pictures are not there."""
    source = task if task in ("clothes", "digits", "flags") else "emoji"
    if source not in sources:
        raise ValueError(f"The task {task!r} needs {source}.npz, which {_COLLECT} writes.")


def parts(sources: Sources) -> dict[bool, Sources]:
    """Return the sources of training (False) and held out (True); one without held out is both.

    `things` are the emoji of a kind.
    """
    out: dict[bool, Sources] = {}
    for heldout in (False, True):
        categories = {
            name: source.part(heldout=heldout) if source.heldout.any() else source
            for name, source in sources.items()
        }
        if "emoji" in categories:
            kinds = categories["emoji"].kinds
            categories["things"] = categories["emoji"].take(
                np.flatnonzero(np.isin(kinds, list(KINDS)))
            )
        out[heldout] = categories
    return out


def halves(sources: Sources) -> tuple[Sources, Sources]:
    """Return every other picture of each source, and the ones between them."""

    def half(start: int) -> Sources:
        every = ((name, source, np.arange(start, len(source.names), 2)) for name, source in items)
        return {name: source.take(rows) for name, source, rows in every}

    items = tuple(sources.items())
    return half(0), half(1)


def draw(task: str, sources: Sources, count: int, seed: int) -> list[Example]:
    """Return examples of a task; `sources` are those of one part. ValueError as check_sources."""
    check_sources(task, sources)
    stream = zlib.crc32(task.encode())
    return [TASKS[task](sources, np.random.default_rng((seed, stream, n))) for n in range(count)]


def _one(image: np.ndarray, prompt: str, answer: str) -> Example:
    return Example(image[None], prompt, answer, (answer,))


def _named(source: str, prompt: str, least: int) -> Callable:
    def task(sources: Sources, rng: np.random.Generator) -> Example:
        pictures = sources[source]
        row = int(rng.integers(len(pictures.names)))
        image = scenes.alone(pictures.images[row], rng, least=least)
        return _one(image, prompt, str(pictures.names[row]))

    return task


def _kind(sources: Sources, rng: np.random.Generator) -> Example:
    things = sources["things"]
    row = int(rng.integers(len(things.names)))
    image = scenes.alone(things.images[row], rng)
    return _one(image, "Which kind of thing?", str(things.kinds[row]))


def _scene(sources: Sources, rng: np.random.Generator, least: int = 1) -> tuple[scenes.Scene, list]:
    drawn = scenes.scene(sources["things"], int(rng.integers(least, MOST_THINGS + 1)), rng)
    return drawn, [str(sources["things"].kinds[thing.row]) for thing in drawn.things]


def _list(sources: Sources, rng: np.random.Generator) -> Example:
    drawn, kinds = _scene(sources, rng)
    pairs = zip(kinds, drawn.things, strict=True)
    listed = "; ".join(f"{kind} {thing.place}" for kind, thing in pairs)
    return _one(drawn.image, "List everything.", listed)


def _any(sources: Sources, rng: np.random.Generator) -> Example:
    drawn, kinds = _scene(sources, rng)
    kind = str(rng.choice(list(KINDS)))
    return _one(drawn.image, f"Is there a {kind}?", "yes" if kind in kinds else "no")


def _count(sources: Sources, rng: np.random.Generator) -> Example:
    drawn, _ = _scene(sources, rng, least=0)
    return _one(drawn.image, "How many things?", str(len(drawn.things)))


def _presence(sources: Sources, rng: np.random.Generator) -> Example:
    drawn, kinds = _scene(sources, rng, least=0)
    present = tuple(kind for kind in KINDS if kind in kinds)
    return Example(
        drawn.image[None], "Which kinds are here?", ", ".join(present) or NO_KIND, present
    )


def _boxes(sources: Sources, rng: np.random.Generator) -> Example:
    drawn, kinds = _scene(sources, rng)
    boxes = tuple(
        (kind, tuple(side / scenes.SIDE for side in thing.box))
        for kind, thing in zip(kinds, drawn.things, strict=True)
    )
    answer = in_words(boxes)
    return Example(drawn.image[None], "Find everything.", answer, tuple(kinds), boxes)


def _where(sources: Sources, rng: np.random.Generator) -> Example:
    while True:
        drawn, kinds = _scene(sources, rng)
        once = [n for n, kind in enumerate(kinds) if kinds.count(kind) == 1]
        if once:
            chosen = once[int(rng.integers(len(once)))]
            prompt = f"Where is the {kinds[chosen]}?"
            return _one(drawn.image, prompt, drawn.things[chosen].place)


def _motion(sources: Sources, rng: np.random.Generator) -> Example:
    things = sources["things"]
    row, motion = int(rng.integers(len(things.names))), str(rng.choice(list(scenes.MOTIONS)))
    images = scenes.frames(things.images[row], motion, FRAMES, rng)
    return Example(images, "Which way does it move?", motion, (motion,))


TASKS: dict[str, Callable[[Sources, np.random.Generator], Example]] = {
    "name": _named("emoji", "What is this?", 40),
    "kind": _kind,
    "list": _list,
    "any": _any,
    "clothes": _named("clothes", "Which clothes are these?", 48),
    "digits": _named("digits", "Which digit is this?", 32),
    "flags": _named("flags", "Which country has this flag?", 40),
    "count": _count,
    "presence": _presence,
    "boxes": _boxes,
    "where": _where,
    "motion": _motion,
}
BASE_TASKS = ("name", "kind", "list", "any")
