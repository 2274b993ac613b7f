"""One engine over a tiny random model with eight adapters, for the tests of what it promises."""

import threading

import pytest
from support.cases.engine_cases import SHAPES, make_engine, settle


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("main")


@pytest.fixture(scope="session")
def engine(folder):
    before = set(threading.enumerate())
    with make_engine(folder, SHAPES["llama"]) as engine:
        started = set(threading.enumerate()) - before
        yield engine
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0
        assert engine.is_alive()
    assert not engine.is_alive()
    left = set(threading.enumerate()) - before  # of other tests of the session too
    assert not [t for t in left if "engine" in t.name or (t in started and not t.daemon)]
