"""The bound of XLA's memory, and what a process needs."""

import contextlib
import functools
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from serving.runtime import xla_memory


@pytest.fixture
def options(monkeypatch):
    """Options of a CUDA client that jax has not made yet."""
    given = {"allocator": "cuda_async", "preallocate": False}
    factory = functools.partial(lambda name, options: None, "cuda", options=given)
    factories = {"cuda": SimpleNamespace(factory=factory)}
    monkeypatch.setattr(xla_memory.xla_bridge, "_backend_factories", factories)
    monkeypatch.setattr(xla_memory.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(xla_memory, "_bounded", [])
    return given


def test_a_bound_is_an_option_of_the_client_that_is_to_come(options):
    assert not xla_memory.is_bounded()
    assert xla_memory.bound(250, 1000)
    assert options == {"allocator": "default", "preallocate": True, "memory_fraction": 0.25}
    assert xla_memory.is_bounded()


def test_a_client_that_is_there_gets_no_bound(options, monkeypatch):
    monkeypatch.setattr(xla_memory.xla_bridge, "backends_are_initialized", lambda: True)
    assert not xla_memory.bound(250, 1000)
    assert options["allocator"] == "cuda_async"
    assert not xla_memory.is_bounded()


def test_without_cuda_there_is_no_bound(options, monkeypatch):
    monkeypatch.setattr(xla_memory.xla_bridge, "_backend_factories", {})
    assert not xla_memory.bound(250, 1000)


class Held:
    """An array of the rest, as far as it is used."""

    def __init__(self, host):
        self.nbytes, self.deleted = host.nbytes, False

    def block_until_ready(self):
        return self

    def delete(self):
        self.deleted = True


def test_the_rest_of_a_bound_is_one_array_while_large_ones_are_made(options, monkeypatch):
    """It has gone afterwards, also where one of them could not be made."""
    mib, made = 1 << 20, []
    stats = {"bytes_limit": 100 * mib, "bytes_in_use": 40 * mib}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(xla_memory.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(
        xla_memory.jax, "device_put", lambda host: made.append(Held(host)) or made[-1]
    )
    with xla_memory.large_arrays(50 * mib):  # without a bound
        assert not made
    xla_memory.bound(100 * mib, 1000 * mib)
    for error in (None, MemoryError):
        with contextlib.suppress(MemoryError), xla_memory.large_arrays(50 * mib):
            assert (made[-1].nbytes, made[-1].deleted) == (8 * mib, False)
            if error is not None:
                raise error
        assert made[-1].deleted
    with xla_memory.large_arrays(59 * mib):
        assert len(made) == 2  # nothing is left


class Pieces:
    """XLA's allocator (BFC): the smallest free piece that fits, split if it is twice as large."""

    def __init__(self, limit):
        self.limit, self.free, self.used = limit, [limit], 0

    def take(self, size):
        """Return the bytes of the piece that an array gets; None: it is out of memory."""
        fitting = sorted(piece for piece in self.free if piece >= size)
        if not fitting:
            return None
        piece = fitting[0]
        self.free.remove(piece)
        if piece >= 2 * size or piece - size >= 128 << 20:
            self.free.append(piece - size)
            piece = size
        self.used += piece
        return piece

    def give(self, piece):
        """Take a piece back, none beside which is free."""
        self.used -= piece
        self.free.append(piece)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("page_mib", [32, 64])
def test_small_arrays_have_memory_behind_large_ones(is_kept, page_mib, options, monkeypatch):
    """As a function starts: pools of rank rows, KV pages of 64 arrays, rows of sampling state."""
    mib, others = 1 << 20, 14 << 20
    pieces = Pieces(78 * mib + 64 * page_mib * mib + others)
    stats = lambda: {"bytes_limit": pieces.limit, "bytes_in_use": pieces.used}  # noqa: E731
    device = SimpleNamespace(memory_stats=stats)

    def put(host):
        held = Held(host)
        piece = pieces.take(held.nbytes)
        held.delete = lambda: pieces.give(piece)
        return held

    monkeypatch.setattr(xla_memory.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(xla_memory.jax, "device_put", put)
    if is_kept:
        xla_memory.bound(pieces.limit, 1 << 40)
    assert pieces.take(45 * mib)
    assert pieces.take(33 * mib)
    with xla_memory.large_arrays(64 * page_mib * mib):
        assert all(pieces.take(page_mib * mib) for _ in range(64))
    state = pieces.take(8 * 2785 * 4)
    assert (state is not None) == is_kept
    if is_kept:
        assert pieces.take(8 * mib)  # temporary arrays of a step


def test_what_is_needed_is_what_is_there_and_the_largest_program(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 1000})
    monkeypatch.setattr(xla_memory.jax, "local_devices", lambda: [device])
    large = jax.jit(lambda x: jnp.sort(x @ x) + 1).lower(jnp.ones((64, 64))).compile()
    small = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    needed, analysis = xla_memory.needed_bytes([small, large]), large.memory_analysis()
    assert needed is not None
    assert analysis is not None
    own = needed - 1000 - xla_memory.SPARE_BYTES
    assert own == analysis.temp_size_in_bytes + analysis.output_size_in_bytes >= 64 * 64 * 4


def test_programs_without_room_are_refused_before_they_run(monkeypatch, caplog):
    caplog.set_level("INFO")
    large = jax.jit(lambda x: jnp.sort(x @ x) + 1).lower(jnp.ones((64, 64))).compile()
    own = xla_memory.own_bytes([large])
    assert own is not None
    stats = {"bytes_limit": own + 9, "bytes_in_use": 9}
    monkeypatch.setattr(
        xla_memory.jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)]
    )
    xla_memory.check_room([large])
    assert "Arrays of a step: up to 0.0 MB; 0.0 are free." in caplog.text
    stats["bytes_in_use"] = 10
    with pytest.raises(ValueError, match=rf"up to {own} bytes; .* leave {own - 1} of .* Lower gpu"):
        xla_memory.check_room([large])
    with monkeypatch.context() as bound:
        bound.setattr(xla_memory, "_bounded", [own])  # XLA says it, and another start has more
        xla_memory.check_room([large])
    stats["bytes_limit"] = 0  # the driver's allocator has no limit of its own
    xla_memory.check_room([large])


@pytest.mark.parametrize("stats", [None, {}])
def test_a_device_that_counts_nothing_says_nothing(monkeypatch, stats):
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(xla_memory.jax, "local_devices", lambda: [device])
    assert xla_memory.needed_bytes([]) is None


@pytest.mark.gpu
def test_on_a_gpu_xla_takes_its_bytes_at_once():
    code = (
        "from jax._src import xla_bridge\n"
        "xla_bridge._discover_and_register_pjrt_plugins()\n"
        "from serving.runtime import xla_memory\n"
        "from lora_jax.memory.platforms import for_platform\n"
        "usage = for_platform('gpu').usage()\n"
        "assert xla_memory.bound(256 << 20, usage.device_used + usage.device_free)\n"
        "import jax, jax.numpy as jnp\n"
        "jnp.ones(3).block_until_ready()\n"
        "stats = jax.local_devices()[0].memory_stats()\n"
        "assert abs(stats['bytes_limit'] - (256 << 20)) < 1 << 20, stats\n"
        "try:\n"
        "    jnp.ones(128 << 20).block_until_ready()\n"
        "except jax.errors.JaxRuntimeError as error:\n"
        "    print('refused', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("refused RESOURCE_EXHAUSTED"), done.stderr
