"""The device memory that XLA's allocator takes: all that a process needs, at once.

XLA's own allocator gives the arrays of a step the same addresses each time, so that the step's
CUDA graph stays as it is. But it takes most of the device, or twice what it took before each time,
unless it knows its limit. The driver's (`cuda_async`) takes what is asked for. With it a step took
longer to dispatch, most after a pause; that its addresses differ then is the likely reason.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax._src import xla_bridge  # jax reads its environment once, before a process is forked
from jax.stages import Compiled

logger = logging.getLogger(__name__)

# For what no program says: small arrays that come and go, in places that were left for them, and
# gaps between arrays. So many suffice by a model of XLA's allocator, since `large_arrays`. With 28
# MiB no start on an H200 has run out of memory: a function that does starts again with so many.
SPARE_BYTES = 6 << 20
_LEFT_BYTES = 2 << 20  # beside the large arrays while they are made: of other threads, alignment
LESS = (
    "Lower gpu_memory_utilization or kv_cache_memory_bytes, or max_model_len or max_num_seqs, by "
    "which attention sets memory aside."
)
_bounded: list[int] = []  # bytes, where this process has a bound


def bound(num_bytes: int, device_bytes: int) -> bool:
    """Let XLA take so many of the device's `device_bytes` at its start, and never more.

    Returns False where that cannot be said: jax has no CUDA, or is at work already.
    """
    registered = xla_bridge._backend_factories.get("cuda")
    options = getattr(getattr(registered, "factory", None), "keywords", {}).get("options")
    if xla_bridge.backends_are_initialized() or not isinstance(options, dict):
        return False
    share = num_bytes / device_bytes
    options.update(allocator="default", preallocate=True, memory_fraction=share)
    _bounded[:] = [num_bytes]
    return True


def is_bounded() -> bool:
    """True if XLA took all of its memory at the start of this process."""
    return bool(_bounded)


@contextlib.contextmanager
def large_arrays(num_bytes: int) -> Iterator[None]:
    """Keep the rest of a bound in one piece while arrays of so many bytes together are made.

    XLA's allocator splits a free piece for an array only if it is twice as large or has 128 MiB
    more. The last of the large arrays would so have all that is left, and the next small one
    nothing. Without a bound nothing is kept.
    """
    stats = (jax.local_devices()[0].memory_stats() or {}) if _bounded else {}
    rest = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) - num_bytes - _LEFT_BYTES
    kept = jax.device_put(np.zeros(rest, np.uint8)) if rest > 0 else None  # it compiles nothing
    try:
        yield
    finally:
        if kept is not None:
            kept.block_until_ready().delete()


def needed_bytes(programs: Iterable[Compiled]) -> int | None:
    """Return what a process with these programs needs: the arrays that it has, the temporary ones
    and results of its largest program, and `SPARE_BYTES`.

    None: the device or a program does not say it.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_in_use" not in stats:
        return None
    own = own_bytes(programs)
    return None if own is None else int(stats["bytes_in_use"]) + own + SPARE_BYTES


def own_bytes(programs: Iterable[Compiled]) -> int | None:
    """Return the bytes of temporary arrays and results of the program that has the most.

    None: one does not say it.
    """
    most = 0
    for compiled in programs:
        analysis = compiled.memory_analysis()
        if analysis is None:
            return None
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        most = max(most, analysis.temp_size_in_bytes + results)
    return most


def check_room(programs: Iterable[Compiled]) -> None:
    """Log what the programs' own arrays take, and raise ValueError where the device lacks it.

    Where jax has no limit nothing is said, nor under a bound: a function whose bound is too small
    is started again with more memory when XLA refuses an array.
    """
    if is_bounded():
        return
    stats = jax.local_devices()[0].memory_stats() or {}
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    own = own_bytes(programs) if limit else None
    if own is None:
        return
    logger.info("Arrays of a step: up to %.1f MB; %.1f are free.", own / 1e6, (limit - used) / 1e6)
    if own > limit - used:
        raise ValueError(
            f"A step's own arrays take up to {own} bytes; weights, adapters and KV pages leave "
            f"{limit - used} of {limit}. {LESS}"
        )
