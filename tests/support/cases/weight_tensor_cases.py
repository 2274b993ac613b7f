"""Weight tensors over the pages of a host, and bytes of their experts."""

import numpy as np
from support.doubles.faulty_memory import FaultyMemory

from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.weight_tensor import WeightTensor

PAGE = 4096
SHAPE = (40, 22, 128)  # 2.75 pages of float32 an expert, as DeepSeek-V2-Lite's in 2 MiB pages
F32 = np.dtype(np.float32)


def make_tensor(
    holes: str = "none", budget: int = 200, shape: tuple[int, int, int] = SHAPE
) -> tuple[WeightTensor, FaultyMemory]:
    memory = FaultyMemory(HostMemory(holes))  # pyright: ignore[reportArgumentType]
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=budget * PAGE)
    return WeightTensor(pool, shape, F32), memory


def random_experts(count: int, seed: int, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape[1:]), np.float32)


def read(tensor: WeightTensor, index: int) -> np.ndarray:
    at = tensor.address + index * tensor.expert_bytes
    values = np.frombuffer(tensor.pool.memory.read(at, tensor.expert_bytes), tensor.dtype)
    return values.reshape(tensor.shape[1:])
