"""Rows are held from admission until an image's tokens are planned, and let go a step later."""

from serving.api.images import PreparedImage, PromptImage
from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.sequence_images import SequenceImages


def make(*spans: tuple[int, int, bytes]) -> Sequence:
    """A sequence with images of (start, size, key)."""
    images = tuple(
        PromptImage(PreparedImage(None, (1, size), size, key), start, key)
        for start, size, key in spans
    )
    request = Request(
        request_id="r",
        prompt_ids=tuple(range(20)),
        sampling=Sampling(),
        adapter=None,
        adapter_digest="",
        on_output=lambda delta: None,
        arrival_s=0.0,
        deadline_s=0.0,
        images=images,
    )
    return Sequence(request=request, index=0, seed=0, token_ids=list(range(20)), slot=3)


def test_two_sequences_with_one_image_encode_it_once():
    images = SequenceImages(8)
    first, second = make((2, 4, b"a")), make((5, 4, b"a"))
    assert images.give(first)
    assert images.give(second)
    (work,) = images.take_encodes()
    assert (work.rows, work.slot) == (first.image_rows[0], 3)
    assert first.image_rows == second.image_rows
    assert images.take_encodes() == ()
    images.check_integrity([first, second])


def test_rows_are_given_away_only_after_the_step_that_reads_them():
    images = SequenceImages(4)
    first, second = make((0, 4, b"a")), make((0, 4, b"b"))
    assert images.give(first)
    first.num_computed = 4  # planned in this very step
    assert not images.give(second)
    images.start_step()
    assert images.give(second)
    images.check_integrity([first, second])
    assert images.stats.rows_used == 4


def test_images_in_known_prefixes_need_no_rows():
    images = SequenceImages(4)
    sequence = make((0, 4, b"a"), (6, 4, b"b"))
    sequence.num_computed = 5
    assert images.give(sequence)
    assert sequence.image_rows[0] == ()
    assert len(sequence.image_rows[1]) == 4
    images.take_back(sequence)
    images.check_integrity([])
    images.start_step()
    images.check_integrity([])
    assert images.give(make((0, 4, b"c")))


def test_an_image_that_a_known_prefix_cuts_needs_rows():
    images = SequenceImages(4)
    sequence = make((0, 4, b"a"))
    sequence.num_computed = 3
    assert images.give(sequence)
    assert len(sequence.image_rows[0]) == 4
    assert len(images.take_encodes()) == 1


def test_a_cut_image_keeps_its_rows():
    images = SequenceImages(4)
    sequence = make((2, 4, b"a"))
    images.give(sequence)
    sequence.num_computed = 5
    images.start_step()
    assert not images.give(make((0, 1, b"b")))
    sequence.num_computed = 6
    images.start_step()
    assert images.give(make((0, 1, b"b")))
