"""Models over an arena: the owner's load writes into it, another process's load finds it there.

Both are the loader's own walk over a checkpoint's parameters, so that an attached model has the
structure, the forms of quantised matrices and the checks of one that read the files.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.config import ModelConfig
from lora_jax.memory.arena import Arena, ImportedArena
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.models.loader import Fill, load, read_config, wanted_dtype
from lora_jax.models.registry import abstract
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array

_PARTS_ROOM = 4096  # bytes of a parameter beside its plain size: alignment, scales


def load_into_arena(
    path: str | Path, memory: AbstractVirtualMemory, *, dtype: Any = None
) -> tuple[AbstractCausalLM, ModelConfig, Arena]:
    """Return a folder's model with all its weights in a new arena, ready to be published.

    The host holds one parameter beside the arena. Raises ValueError as `load` does, and for
    weights of a dtype that cannot be shown to others.
    """
    arena = Arena(memory, _most_bytes(Path(path), dtype))

    def place(name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> Array:
        values = np.empty(shape, dtype)
        fill(tuple(range(size) for size in shape), values)
        return arena.add(name, values)

    model, config = load(path, dtype=dtype, place=place)
    return model, config, arena


def load_from_arena(
    path: str | Path, arena: ImportedArena, *, dtype: Any = None
) -> tuple[AbstractCausalLM, ModelConfig]:
    """Return a folder's model over another process's weights; of the files only heads are read.

    Raises ValueError where the arena does not hold this model in this dtype.
    """

    def place(name: str, shape: tuple[int, ...], dtype: np.dtype, _: Fill) -> Array:
        return arena.array(name, shape, dtype)

    return load(path, dtype=dtype, place=place)


def _most_bytes(folder: Path, dtype: Any) -> int:
    """Return what all weights take where none is quantised; quantised ones take less."""
    _, state = abstract(read_config(folder), jnp.dtype(wanted_dtype(folder, dtype)))
    params = [param for _, param in nnx.to_flat_state(state)]
    sizes = [int(np.prod(p.shape, dtype=np.int64)) * np.dtype(p.dtype).itemsize for p in params]
    return sum(sizes) + _PARTS_ROOM * len(sizes)
