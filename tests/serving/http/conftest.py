"""A server over the fake engine, one per test module."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, write_fake_adapters
from http_server import client_of

from serving.http.app import create_app
from serving.http.settings import HttpSettings


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_adapters(tmp_path_factory.mktemp("http") / "adapters", "sql", "law")


@pytest.fixture(scope="module")
def engine(lora_dir: Path) -> FakeEngine:
    return FakeEngine(lora_dir)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    settings = HttpSettings(enable_runtime_lora=True, keep_alive_s=0.1)
    with client_of(create_app(engine, settings)) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to the fake engine, no request stays in it."""
    used = "engine" in request.fixturenames
    engine = request.getfixturevalue("engine") if used else None
    yield
    if isinstance(engine, FakeEngine):
        engine.open.set()
        assert not engine.running
