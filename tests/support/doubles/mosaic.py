"""The Mosaic GPU interpreter on a CPU: races are errors, a failed test leaves no state behind."""

import contextlib
from collections.abc import Iterator

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def interpreted() -> Iterator[plgpu.InterpretGPUParams]:
    """Yield what a kernel takes as `interpret`; fail if anything raced meanwhile.

    Results must be awaited within: a kernel ends by callbacks that come after its last store.
    """
    try:
        yield plgpu.InterpretGPUParams(detect_races=True)
        jax.effects_barrier()
        assert not interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
