"""Rows of the encoder cache under random holders: none lost, none shared by two images."""

import random

import pytest

from serving.scheduling.encoder_rows import EncoderRows


def test_an_image_is_computed_once_and_found_again():
    rows = EncoderRows(10)
    assert rows.hold([(b"a", 4)]) == [True]
    assert rows.hold([(b"a", 4), (b"b", 3), (b"b", 3)]) == [False, True, False]
    assert (rows.queries, rows.hits, rows.num_used) == (4, 2, 7)
    rows.check_integrity([b"a", b"a", b"b", b"b"])
    for key in (b"a", b"a", b"b", b"b"):
        rows.release(key)
    assert rows.hold([(b"a", 4)]) == [False]
    rows.check_integrity([b"a"])


def test_the_least_recently_used_goes_first_and_held_ones_stay():
    rows = EncoderRows(6)
    for key in (b"a", b"b", b"c"):
        rows.hold([(key, 2)])
    for key in (b"b", b"a"):
        rows.release(key)
    assert rows.hold([(b"d", 2)]) == [True]
    assert rows.hold([(b"a", 2)]) == [False]  # b went
    assert rows.hold([(b"b", 2)]) is None
    rows.check_integrity([b"a", b"c", b"d"])


def test_what_is_short_changes_nothing():
    rows = EncoderRows(4)
    rows.hold([(b"a", 3)])
    rows.release(b"a")
    assert rows.hold([(b"a", 3), (b"b", 2)]) is None  # a is idle, yet asked for itself
    rows.check_integrity([])
    assert rows.hold([(b"b", 4)]) == [True]
    with pytest.raises(ValueError, match="nobody holds"):
        rows.release(b"a")


def test_random_holders_leave_the_books_in_order():
    random_, rows, held = random.Random(0), EncoderRows(24), []
    sizes = {bytes([n]): random_.randint(1, 9) for n in range(9)}
    for _ in range(800):
        if held and random_.random() < 0.5:
            rows.release(held.pop(random_.randrange(len(held))))
        else:
            wanted = random_.choices(sorted(sizes), k=random_.randint(1, 3))
            made = rows.hold([(key, sizes[key]) for key in wanted])
            if made is not None:
                held += wanted
                assert all(len(rows.rows_of(key)) == sizes[key] for key in wanted)
        rows.check_integrity(held)
