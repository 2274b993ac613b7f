"""Objects of a start are not looked through again while a server runs."""

import gc
import weakref

import pytest

from serving.runtime.garbage import rare_collections


class Ring:
    """An object that only the collector can free."""

    def __init__(self):
        self.ring = self


@pytest.fixture
def before():
    """Python's own thresholds."""
    of_tests, pythons = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*pythons)
    yield pythons
    gc.set_threshold(*of_tests)


def test_only_what_comes_later_is_collected_and_all_is_as_before_at_the_end(before):
    frozen = gc.get_freeze_count()
    garbage, old = weakref.ref(Ring()), Ring()
    with rare_collections():
        assert garbage() is None  # garbage of the start is freed
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold()[0] > before[0]
        kept, new = weakref.ref(old), weakref.ref(Ring())
        del old
        gc.collect()
        assert new() is None
        assert kept() is not None
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    gc.collect()
    assert kept() is None
