"""Makes four files of images from published packages, which are unpacked before.

    python -m lora_jax.finetune.pictures.collect --clothes DIR --emoji DIR --flags DIR --out DATA

--clothes is a folder with the idx files of Fashion-MNIST (MIT), --emoji the package
emoji-datasource-twitter (images CC BY 4.0), --flags the package svg-country-flags (public domain).
Digits are those of scikit-learn (UCI). Each file holds `images`, `names` and `heldout`.
"""

import argparse
import dataclasses
import gzip
import json
import pathlib
import zlib
from typing import Any

import numpy as np
from PIL import Image

CLOTHES = (
    *("t-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)
# Kinds of things in scenes: how subcategories of emoji begin.
KINDS = {
    "face": ("face-",),
    "animal": ("animal-",),
    "food": ("food-", "drink", "dishware"),
    "vehicle": ("transport-",),
    "clothing": ("clothing",),
}
SIDE = 48  # pixels of an emoji and of a flag
_HELDOUT = 8  # of so many emoji one is held out


@dataclasses.dataclass(frozen=True, eq=False)
class Pictures:
    """Images of one source with a name each; `heldout` ones are for measuring only."""

    images: np.ndarray  # uint8 [count, height, width, channels]
    names: np.ndarray  # str [count]
    heldout: np.ndarray  # bool [count]
    kinds: np.ndarray  # str [count]; "" where a source has none

    def part(self, *, heldout: bool) -> "Pictures":
        """Return the images of one part."""
        return self.take(np.flatnonzero(self.heldout == heldout))

    def take(self, rows: np.ndarray) -> "Pictures":
        """Return the images at `rows`."""
        fields = (self.images, self.names, self.heldout, self.kinds)
        return Pictures(*(field[rows] for field in fields))

    def save(self, path: pathlib.Path) -> None:
        """Write them to an .npz file."""
        np.savez_compressed(
            path, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        )


def load(path: pathlib.Path) -> Pictures:
    """Return what `save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return Pictures(*(file[field.name] for field in dataclasses.fields(Pictures)))


def held(text: str, every: int = _HELDOUT) -> bool:
    """Return whether a name is held out: one of `every`, by a checksum."""
    return zlib.crc32(text.encode()) % every == 0


def read_clothes(folder: pathlib.Path) -> Pictures:
    """Return Fashion-MNIST; its test images are held out."""
    parts = {"train": False, "t10k": True}
    images = [_idx(folder / f"{part}-images-idx3-ubyte.gz", 16) for part in parts]
    labels = [_idx(folder / f"{part}-labels-idx1-ubyte.gz", 8) for part in parts]
    heldout = np.concatenate(
        [np.full(len(y), h) for y, h in zip(labels, parts.values(), strict=True)]
    )
    pixels = np.concatenate(images).reshape(-1, 28, 28, 1)
    names = np.array(CLOTHES)[np.concatenate(labels)]
    return Pictures(pixels, names, heldout, np.full(len(names), ""))


def _idx(path: pathlib.Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes())[header:], np.uint8)


def read_digits() -> Pictures:
    """Return scikit-learn's digits of 8 x 8; each fifth is held out."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = np.clip(found.images * 16, 0, 255).astype(np.uint8)[..., None]
    names = found.target.astype(str)
    return Pictures(images, names, np.arange(len(names)) % 5 == 0, np.full(len(names), ""))


def read_emoji(folder: pathlib.Path) -> Pictures:
    """Return the emoji, without tones of skin, flags and keycaps; one of eight is held out."""
    rows = json.loads((folder / "emoji.json").read_text(encoding="utf-8"))
    images, names, kinds = [], [], []
    for row in rows:
        path = folder / "img/twitter/64" / row["image"]
        if row["category"] in ("Flags", "Component") or "keycap" in row["subcategory"]:
            continue
        if not path.is_file():
            continue
        images.append(_square(path))
        names.append(row["short_name"].replace("_", " ").replace("-", " "))
        matching = (k for k, begin in KINDS.items() if row["subcategory"].startswith(begin))
        kinds.append(next(matching, ""))
    heldout = np.array([held(name) for name in names])
    return Pictures(np.stack(images), np.array(names), heldout, np.array(kinds))


def read_flags(folder: pathlib.Path) -> Pictures:
    """Return flags of countries by name; none is held out: what is drawn of them is."""
    countries = json.loads((folder / "countries.json").read_text(encoding="utf-8"))
    images, names = [], []
    for code, country in sorted(countries.items()):
        path = folder / "png100px" / f"{code.lower()}.png"
        if len(code) == 2 and path.is_file():
            images.append(_square(path))
            names.append(country)
    none = np.full(len(names), False)
    return Pictures(np.stack(images), np.array(names), none, np.full(len(names), ""))


def _square(path: pathlib.Path) -> np.ndarray:
    """Return uint8 [SIDE, SIDE, 4] of an image in the middle of a transparent square."""
    with Image.open(path) as file:
        image = file.convert("RGBA")
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    out = Image.new("RGBA", (SIDE, SIDE))
    out.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return np.asarray(out)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.pictures.collect")
    for name in ("clothes", "emoji", "flags", "out"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {
        "clothes": read_clothes(args.clothes),
        "digits": read_digits(),
        "emoji": read_emoji(args.emoji),
        "flags": read_flags(args.flags),
    }
    for name, pictures in found.items():
        pictures.save(args.out / f"{name}.npz")
        print(f"{name}: {len(pictures.names)} images, {pictures.heldout.sum()} held out")


if __name__ == "__main__":
    main()
