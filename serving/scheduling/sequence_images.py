"""Encoder rows of running sequences: held from admission until an image's tokens are computed.

Rows are let go at the next step only: in a step a tower may run for one sequence before the step
reads the rows of another. No jax.
"""

from collections.abc import Iterable

from serving.api.images import EncodeImage, ImageStats, PromptImage
from serving.api.request import Sequence
from serving.scheduling.encoder_rows import EncoderRows


class SequenceImages:
    """Gives rows of one EncoderRows to sequences, and lists what towers have to compute."""

    def __init__(self, num_rows: int):
        self._rows = EncoderRows(num_rows)
        self._held: dict[Sequence, list[PromptImage]] = {}
        self._done: list[PromptImage] = []
        self._encodes: list[EncodeImage] = []

    def give(self, sequence: Sequence) -> bool:
        """Hold rows for the images that are still to be computed; False changes nothing."""
        images = sequence.request.images
        needed = [image for image in images if image.end > sequence.num_computed]
        sequence.image_rows = [()] * len(images)
        if not needed:
            return True
        are_new = self._rows.hold([(image.key, image.image.num_tokens) for image in needed])
        if are_new is None:
            return False
        self._held[sequence] = needed
        for image, is_new in zip(needed, are_new, strict=True):
            rows = self._rows.rows_of(image.key)
            sequence.image_rows[images.index(image)] = rows
            if is_new:
                self._encodes.append(EncodeImage(image.image, rows, sequence.slot))
        return True

    def take_back(self, sequence: Sequence) -> None:
        """Take all rows from a sequence."""
        self._done += self._held.pop(sequence, ())

    def start_step(self) -> None:
        """Let go of the rows that no step to come reads."""
        for sequence, images in list(self._held.items()):
            left = [image for image in images if image.end > sequence.num_computed]
            self._done += [image for image in images if image.end <= sequence.num_computed]
            if left:
                self._held[sequence] = left
            else:
                del self._held[sequence]
        for image in self._done:
            self._rows.release(image.key)
        self._done = []

    def take_encodes(self) -> tuple[EncodeImage, ...]:
        """Return what towers compute before the step that is planned, once."""
        encodes, self._encodes = tuple(self._encodes), []
        return encodes

    @property
    def stats(self) -> ImageStats:
        rows = self._rows
        return ImageStats(rows.queries, rows.hits, rows.num_used, rows.num_rows)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when rows and the sequences that hold them disagree."""
        assert set(self._held) <= set(running), "a sequence holds rows and does not run"
        every = [image for images in self._held.values() for image in images]
        self._rows.check_integrity([image.key for image in [*every, *self._done]])
