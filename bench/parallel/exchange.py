"""Time of one all-gather between the GPUs of a process, ours beside NCCL's.

`python -m bench.parallel exchange --out DIR`. A figure is the slope between programs of many and of
few exchanges, each program one dispatch; the median of 30 runs. `ours` and `nccl in the graph` run
inside the CUDA graph, `nccl` as launches of its own (XLA's default).
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cuda_backend.all_gather import GatherGroup
from lora_jax.ops.all_gather import all_gather

FEW, MANY, RUNS, ROWS = 32, 160, 30, 64
UNIT = 8  # columns of bfloat16 that the kernel moves at once
COLUMNS = PartitionSpec(None, "tp")
KILOBYTES = (32, 64, 256, 512, 1024, 2048, 4096)
IN_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One row of the table: microseconds for a result of so many KB on each of `devices`."""

    devices: int
    kilobytes: int
    ours_us: float
    nccl_us: float
    nccl_graph_us: float


def exchanges(devices: int) -> list[dict[str, float]]:
    """Return a row for every size over the first `devices` GPUs."""
    group = GatherGroup(devices)
    rows = []
    for size in KILOBYTES:
        rows.append(dataclasses.asdict(measure(devices, size, group.number)))
        print(rows[-1], flush=True)
    group.check()
    return rows


def columns_of(kilobytes: int, devices: int) -> int:
    """Return the columns of a bfloat16 result of about so many KB: equal parts in whole units."""
    whole = kilobytes * 1024 // 2 // ROWS
    return whole // (UNIT * devices) * UNIT * devices


def measure(devices: int, kilobytes: int, group: int) -> Exchange:
    """Return the times of one size; `group` is a GatherGroup's number over the same devices."""
    mesh = jax.make_mesh((devices,), ("tp",), devices=jax.devices()[:devices])
    rows, columns = ROWS, columns_of(kilobytes, devices)
    values = np.random.default_rng(kilobytes).normal(size=(rows, columns))
    x = jax.device_put(jnp.asarray(values, jnp.bfloat16), NamedSharding(mesh, COLUMNS))

    def us(gather: Callable, options: dict[str, str] | None = None) -> float:
        def program(times: int):
            body = jax.shard_map(
                lambda v: _chain(v, gather, times),
                mesh=mesh,
                in_specs=COLUMNS,
                out_specs=COLUMNS,
                check_vma=False,
            )
            return jax.jit(body, compiler_options=options)

        few, many = (_seconds(program(times), x) for times in (FEW, MANY))
        return (many - few) / (MANY - FEW) * 1e6

    def ours(v):
        return all_gather(v, "tp", group=group, implementation="cuda")

    def nccl(v):
        return all_gather(v, "tp", implementation="reference")

    alone = us(lambda v: v)
    graph = {"xla_gpu_enable_command_buffer": IN_GRAPH}
    times = (us(ours), us(nccl), us(nccl, graph))
    return Exchange(devices, kilobytes, *(round(t - alone, 2) for t in times))


def _chain(v: jax.Array, gather: Callable, times: int) -> jax.Array:
    """Exchange again and again; the scale between, a kernel of its own, is in `alone` too."""
    for _ in range(times):
        v = gather(v)[:, : v.shape[1]] * jnp.asarray(0.5, v.dtype)
        v = jax.lax.optimization_barrier(v)  # else XLA makes one kernel of all scales of `alone`
    return v


def _seconds(program: Callable, x: jax.Array) -> float:
    jax.block_until_ready(program(x))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(time.perf_counter() - start)
    return float(np.median(times))
