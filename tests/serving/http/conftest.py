"""A server over the fake engine, one per test module."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bad_adapters import write_bad_adapters
from fake_engine import FakeEngine, write_fake_adapters
from http_server import client_of
from tiny_checkpoint import TinyShape, write_adapter, write_model

from serving import Engine
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


SHAPE = TinyShape(experts=4)


@pytest.fixture(scope="session")
def real_lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good adapters a, b (other rank) and c, bad ones, and links that lead outside."""
    root = tmp_path_factory.mktemp("real") / "adapters"
    for seed, (name, rank) in enumerate({"a": 4, "b": 2, "c": 4}.items(), 1):
        write_adapter(root / name, SHAPE, rank, seed)
    write_bad_adapters(root, root / "a")
    write_adapter(root.parent / "outside", SHAPE, 4, 9)
    (root / "escape").symlink_to(root.parent / "outside")
    (root / "file-escape").mkdir()
    for file in (root.parent / "outside").iterdir():
        (root / "file-escape" / file.name).symlink_to(file)
    return root


@pytest.fixture(scope="session")
def real_engine(real_lora_dir: Path) -> Iterator[Engine]:
    """A tiny random mixture of experts, shared by every test that wants the real thing."""
    model = real_lora_dir.parent / "tiny"
    write_model(model, SHAPE)
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_loras": 2, "max_queue": 16}
    with Engine(str(model), lora_dir=str(real_lora_dir), block_size=4, **fields) as engine:
        yield engine


@pytest.fixture(scope="module")
def real_client(real_engine: Engine) -> Iterator[httpx.Client]:
    settings = HttpSettings(enable_runtime_lora=True)
    with client_of(create_app(real_engine, settings)) as client:
        yield client


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    """The real engine's shape, its tensors, and what each adapter adds to them."""
    folder = tmp_path_factory.mktemp("oracle")
    tensors = write_model(folder / "tiny", SHAPE)
    deltas = {
        name: write_adapter(folder / name, SHAPE, rank, seed)
        for seed, (name, rank) in enumerate({"a": 4, "b": 2, "c": 4}.items(), 1)
    }
    return SHAPE, tensors, deltas
