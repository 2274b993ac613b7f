"""The library of a platform is found by its entry point; its errors are those of a start."""

import importlib.metadata
import tomllib
import types

import jax
import pytest
from support.processes.server_process import ROOT

from cuda_backend import nvshmem
from serving.lora_server.transport import world_library
from serving.lora_server.transport.shapes import moe_shapes
from serving.lora_server.transport.world import World

WORLD = World(b"id", ranks=1, instances=2, one_host=True)
SHAPES = moe_shapes(1, 8, 32, 48, "float32")


class Library:
    """Does what it is asked, or fails as it is told."""

    def __init__(self, error=None):
        self.error, self.joined = error, None

    def new_id(self, *, one_host):
        if self.error:
            raise self.error
        return b"one host" if one_host else b"several"

    def join(self, *given, servers, one_host):
        if self.error:
            raise self.error
        self.joined = (*given, servers, one_host)
        return "endpoints"


@pytest.fixture
def found(monkeypatch):
    """Returns a function that installs a library for this platform."""

    def install(made):
        entry = types.SimpleNamespace(load=lambda: lambda: made)
        asked = {"group": world_library.GROUP, "name": "cpu"}

        def entry_points(**wanted):
            return [entry] if wanted == asked else []

        monkeypatch.setattr(world_library.importlib.metadata, "entry_points", entry_points)
        return made

    return install


def test_this_process_joins_as_its_pe_with_the_largest_slot(found):
    library = found(Library())
    assert world_library.new_id(one_host=False) == b"several"
    assert world_library.join(WORLD, 2, SHAPES) == "endpoints"
    largest = max(SHAPES.request_slot, SHAPES.response_slot)
    assert library.joined == (0, 2, 3, b"id", largest, 1, True)


def test_a_world_that_does_not_begin_is_an_error_of_the_connection(found):
    found(Library(RuntimeError("error 7")))
    with pytest.raises(ConnectionError, match="PE 2 of 3: error 7"):
        world_library.join(WORLD, 2, SHAPES)
    with pytest.raises(ConnectionError, match="error 7"):
        world_library.new_id(one_host=True)


def test_a_library_that_cannot_run_says_so(found):
    found(Library(NotImplementedError("install it")))
    with pytest.raises(NotImplementedError, match="install it"):
        world_library.join(WORLD, 0, SHAPES)
    with pytest.raises(NotImplementedError, match="install it"):
        world_library.new_id(one_host=True)


def test_a_platform_without_a_library_is_refused(monkeypatch):
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        with pytest.raises(NotImplementedError, match=f"computes on {platform}: leave"):
            world_library.library()


def test_an_installation_of_an_older_release_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(world_library.importlib.metadata, "entry_points", lambda **wanted: [])
    with pytest.raises(NotImplementedError, match="install it anew"):
        world_library.library()


def test_nvidia_gpus_have_nvshmem(monkeypatch):
    """The entry point is the one that the package declares; an older installation has none."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    value = declared[world_library.GROUP]["cuda"]
    entry = importlib.metadata.EntryPoint("cuda", value, world_library.GROUP)
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        world_library.importlib.metadata,
        "entry_points",
        lambda **wanted: asked.append(wanted) or [entry],
    )
    assert isinstance(world_library.library(), nvshmem.Nvshmem)
    assert asked == [{"group": world_library.GROUP, "name": "cuda"}]
