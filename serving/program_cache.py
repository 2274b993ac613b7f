"""Compiled programs outlive their process: a second start reads them instead of compiling again.

jax keeps them; a folder that is set in jax (`JAX_COMPILATION_CACHE_DIR`) is left alone, and
`JAX_ENABLE_COMPILATION_CACHE=false` turns this off.
"""

import hashlib
import logging

import jax
from jax.experimental.compilation_cache import compilation_cache

from lora_jax.ops import dispatch, native

logger = logging.getLogger(__name__)

_MAX_BYTES = 8 << 30  # programs used longest ago go first
_MIN_COMPILE_S = 0.2  # faster ones are not worth a file


def keep_programs() -> None:
    """Let jax keep the programs that this process compiles in the folder of compiled kernels."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = dispatch.cache_folder() / "programs" / _machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("Compiled programs are not cached; every start compiles them: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
    compilation_cache.reset_cache()  # jax looks at the settings once, maybe before this


def _machine() -> str:
    """Return a name for what jax's own key leaves out: the features of this CPU."""
    return hashlib.sha256(native.cpu_name().encode()).hexdigest()[:12]
