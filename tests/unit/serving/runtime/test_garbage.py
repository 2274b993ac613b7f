"""Objects of a start are not looked through again while a server runs."""

import contextlib
import gc
import weakref

import pytest

from serving.runtime.garbage import no_collections, rare_collections


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


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_meanwhile_and_an_error_ends_it(enabled):
    of_tests = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ValueError), no_collections():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if of_tests else gc.disable)()
