"""Every tiling that a launch on an H200 may take is compiled for one: none spills a register.

Both what the tables of tuned tilings hold and what the formula guesses beside them. Registers
follow from the tiling and from how many groups are looked at together, hardly from the sizes: one
shape for all, at which nothing is a whole number of tiles, and fewer groups where it is tight.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import pytest
from kernels.aot.compile_gpu import H200, KIND, plugin_is_found
from support.cases.kernel_calls import lora_kernel

from lora_jax.ops import tuning_table
from lora_jax.ops.grouped_matmul import pallas_gpu
from lora_jax.ops.grouped_matmul._gpu_kernel import CROWDED
from lora_jax.ops.grouped_matmul._gpu_tiles import GroupedMatmulConfig, find_config
from lora_jax.ops.lora_gemm import _gpu_schedule
from lora_jax.ops.lora_gemm import pallas_gpu as lora_gpu

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

MATRICES = {"grouped_matmul": 1, "gated_matmul": 2}
ROWS, WIDTH, GROUPS, FEW_GROUPS = 8192, 2880, 64, 8


SLOTS, RANKS = 64, (16, 64, 128)
REGISTERS = 65536  # of an SM


@dataclasses.dataclass(frozen=True)
class Form:
    """What a launch adds to its products, and to how many groups' it does."""

    bias: bool = False
    addends: jnp.dtype | None = None
    groups: int = GROUPS


def tuned(op: str) -> set[GroupedMatmulConfig]:
    """Return the tilings of the table."""
    return {GroupedMatmulConfig(**entry["config"]) for entry in tuned_entries(op)}


def tuned_entries(op: str) -> tuple[dict, ...]:
    """Return the entries of the table."""
    folder = tuning_table.TABLES / tuning_table.device_folder(KIND)
    entries = tuning_table.read(folder / f"{op}.json")
    assert entries
    return entries


def guessed(matrices: int) -> set[GroupedMatmulConfig]:
    """Return the tilings that are taken at sizes which no table has."""
    rows, groups = [1 << n for n in range(17)], (1, 8, 16, 32, 64, 128, 256)
    widths = [256 * n for n in (1, 3, 8, 16, 42, 56, 594)]
    return {find_config(*sizes, matrices) for sizes in itertools.product(rows, groups, widths)}


def is_tight(config: GroupedMatmulConfig, matrices: int) -> bool:
    return matrices * config.columns * config.rows >= CROWDED


def forms(op: str, config: GroupedMatmulConfig) -> list[Form]:
    """Return the forms that a tiling is compiled in: all of them where registers are few."""
    if not is_tight(config, MATRICES[op]):
        return [Form()]
    found = [Form(), Form(groups=FEW_GROUPS)]
    found += [Form(addends=jnp.dtype(dtype)) for dtype in ("bfloat16", "float32")]
    biased = [Form(bias=True), Form(bias=True, addends=jnp.dtype("bfloat16"))]
    return found + (biased if op == "grouped_matmul" else [])


def beside(form: Form, config: GroupedMatmulConfig, matrices: int) -> GroupedMatmulConfig | None:
    """Return the tiling that this form takes where the table or the formula says `config`."""
    if form.addends is None and not form.bias:
        return config
    some = jnp.zeros((1, 1), form.addends) if form.addends else None
    return pallas_gpu._beside(() if some is None else (some,), config, matrices)


def launches() -> dict[str, tuple[str, GroupedMatmulConfig, Form]]:
    """Return every distinct launch by a name."""
    found = {}
    for op, matrices in MATRICES.items():
        for config in tuned(op) | guessed(matrices):
            for form in forms(op, config):
                taken = beside(form, config, matrices)
                if taken is None:
                    continue
                size = f"{taken.warpgroups} x {taken.columns} x {taken.rows} by {taken.part}"
                added = "biased, " * form.bias + (f"{form.addends} added, " if form.addends else "")
                stages = f"{taken.stages} stages of {taken.step} in each of {taken.ctas}"
                name = f"{op} {size}, {stages}, {added}{form.groups} groups"
                launch = op, taken, form
                assert found.setdefault(name, launch) == launch
    return found


LAUNCHES = launches()


@pytest.fixture(scope="module")
def h200() -> H200:
    if not plugin_is_found():
        pytest.skip("the CUDA plugin is not on the path: make test-aot")
    return H200()


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_no_register_spills(h200, name):
    op, config, form = LAUNCHES[name]
    bf16, matrices = jnp.bfloat16, MATRICES[op]
    x, w = h200.array((ROWS, WIDTH), bf16), h200.array((form.groups, WIDTH, WIDTH), bf16)
    sizes, bias = h200.array((form.groups,), jnp.int32), None
    addends = [h200.array((ROWS, WIDTH), form.addends)] * matrices if form.addends else []
    if form.bias:
        bias = h200.array((form.groups, WIDTH), bf16)
    weights = (w, sizes, bias) if matrices == 1 else (w, w, sizes)
    call = functools.partial(getattr(pallas_gpu, op), config=config, interpret=False)
    done = h200.compile(call, x, *weights, *addends)
    print(f"{name}: {done.registers}, {done.spill_bytes}, {done.seconds:.1f} s")
    assert [*done.spill_bytes.values()] == [0]


def lora_launches() -> dict[str, tuple[_gpu_schedule.LoraGemmConfig, int]]:
    """Return every distinct tiling of lora_gemm, with its largest rank, by a name."""
    found = set()
    for entry in tuned_entries("lora_gemm"):
        config = _gpu_schedule.LoraGemmConfig(**entry["config"])
        found |= {(_gpu_schedule.fitted(config, rank), rank) for rank in RANKS}
    for rows, rank in itertools.product((1 << n for n in range(17)), RANKS):
        found.add((_gpu_schedule.find_config(rows, SLOTS, rank), rank))
    return {
        f"{c.warpgroups} x {c.columns} x {c.rows}, {c.shrink_stages} and {c.expand_stages} stages, "
        f"{c.slots} works, rank {rank}": (c, rank)
        for c, rank in found
    }


LORA_LAUNCHES = lora_launches()


@pytest.mark.parametrize("name", sorted(LORA_LAUNCHES))
def test_lora_spills_no_register_and_two_ctas_share_an_sm(h200, name):
    config, rank = LORA_LAUNCHES[name]
    rows, pool = h200.array((ROWS, WIDTH), jnp.bfloat16), SLOTS * rank
    pools = [h200.array((pool, WIDTH), jnp.bfloat16)] * 2
    table = (h200.array((SLOTS, 5), jnp.int32), h200.array((SLOTS,), jnp.float32))
    owners = [h200.array((ROWS,), jnp.int32)] * 2
    call = functools.partial(
        lora_kernel(lora_gpu.lora_gemm), max_rank=rank, config=config, interpret=False
    )
    done = h200.compile(call, rows, rows, *pools, *table, *owners)
    print(f"{name}: {done.registers}, {done.spill_bytes}, {done.seconds:.1f} s")
    assert [*done.spill_bytes.values()] == [0, 0]
    for kernel, registers in done.registers.items():
        threads = 128 * (2 if "shrink" in kernel else config.warpgroups + 1)
        given = 8 * -(-registers // 8)
        assert _gpu_schedule.CTAS * threads * given <= REGISTERS, kernel
