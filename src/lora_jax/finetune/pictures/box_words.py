"""Boxes in words, which an LM head writes and reads: "face 2358; food 6279".

The digits of a thing are its left, top, right and bottom side, each the tenth of the image in which
the side lies. A digit is one token of tiny-vl.
"""

import re
from collections.abc import Iterable, Sequence

from lora_jax.adapters.task_head import Box

_TENTHS = 10
_THING = re.compile(r"(\S.*) (\d)(\d)(\d)(\d)")


def in_words(things: Iterable[tuple[str, Sequence[float]]]) -> str:
    """Return labels and boxes as text; sides are parts of the image's, 0 to 1."""
    return "; ".join(f"{label} {''.join(map(_tenth, box))}" for label, box in things)


def from_words(text: str) -> tuple[Box, ...]:
    """Return the boxes that a text tells, sides in the middles of their tenths; the score is 1.

    Parts that are no label with four digits tell no box.
    """
    found = (_THING.fullmatch(part.strip()) for part in text.split(";"))
    return tuple(_box(*match.groups()) for match in found if match)


def _tenth(side: float) -> str:
    return str(min(int(_TENTHS * side), _TENTHS - 1))


def _box(label: str, *digits: str) -> Box:
    left, top, right, bottom = ((int(digit) + 0.5) / _TENTHS for digit in digits)
    return Box(label, 1.0, (left, top, right, bottom))
