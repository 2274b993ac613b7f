"""The weight tensor: experts that come and go under one array, and faults."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.cases.weight_tensor_cases import F32, PAGE, SHAPE, make_tensor, random_experts, read
from support.doubles.faulty_memory import FaultyMemory, Injected

from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.retirement import Retirement
from lora_jax.memory.virtual import MappingError, OutOfPages
from lora_jax.memory.weight_tensor import WeightTensor


@jax.jit
def one_expert(weights, index):
    return jax.lax.dynamic_index_in_dim(weights, index, keepdims=False)


def test_one_array_shows_what_is_mapped_written_and_moved():
    tensor, _ = make_tensor()
    array = tensor.array
    values = random_experts(5, 0)
    tensor.map(range(3, 8))
    tensor.write(3, values)
    for i in range(5):
        np.testing.assert_array_equal(one_expert(array, jnp.int32(3 + i)), values[i])
    tensor.unmap(range(3, 8))
    tensor.map(range(20, 22))
    tensor.write(20, values[:2])
    np.testing.assert_array_equal(one_expert(array, jnp.int32(21)), values[1])
    tensor.write(21, values[4:])
    np.testing.assert_array_equal(one_expert(array, jnp.int32(21)), values[4])
    with tensor._lock:  # as during a long write
        assert tensor.array is array
    assert one_expert._cache_size() == 1
    tensor.close()


def test_any_dtype_and_sizes_smaller_and_larger_than_a_page():
    for shape, dtype in (((6, 3, 5), ml_dtypes.bfloat16), ((3, 64, 128), np.float16)):
        pool = PagePool(HostMemory("none"), page_bytes=PAGE, budget_bytes=64 * PAGE)
        tensor = WeightTensor(pool, shape, np.dtype(dtype))
        values = random_experts(2, 1, shape).astype(dtype)
        tensor.map(range(1, 3))
        tensor.write(1, values)
        np.testing.assert_array_equal(np.asarray(tensor.array[2]), values[1], strict=True)
        tensor.close()
        pool.trim()


def test_a_page_stays_until_the_last_expert_on_it_has_gone():
    """2.75 pages an expert: 0 lies on pages 0..2, 1 on 2..5, 2 on 5..8, 3 on 8..10."""
    tensor, _ = make_tensor()
    for index, pages in ((0, 3), (2, 7), (1, 9), (3, 11)):
        tensor.map(range(index, index + 1))
        assert tensor.bytes_mapped == pages * PAGE
    tensor.check_integrity()
    for index, pages in ((1, 9), (0, 6), (3, 4), (2, 0)):
        tensor.unmap(range(index, index + 1))
        assert tensor.bytes_mapped == pages * PAGE
        tensor.check_integrity()
    assert tensor.pool.stats().in_use == 0
    tensor.close()


def test_experts_mapped_together_share_one_block_and_leave_together():
    """Pages 0..2 are expert 0's alone, 8 and 22 may be neighbours', 9..21 only of these five."""
    tensor, _ = make_tensor()
    tensor.map(range(3, 8))
    assert sorted(block.num_pages for block in tensor.pool._used) == [1, 13]
    tensor.map(range(2, 3))
    tensor.map(range(8, 9))
    pages = tensor.bytes_mapped // PAGE
    assert pages == 14 + 3 + 3
    for index in range(3, 7):
        tensor.unmap(range(index, index + 1))
        tensor.check_integrity()
        assert tensor.bytes_mapped == pages * PAGE  # the block waits for the last of them
    tensor.map(range(4, 6))  # on the block that is still there
    tensor.unmap(range(7, 8))
    assert tensor.bytes_mapped == pages * PAGE
    tensor.unmap(range(4, 6))
    assert tensor.bytes_mapped == (4 + 3) * PAGE
    tensor.check_integrity()
    tensor.close()


def test_neighbours_keep_their_bytes_on_a_shared_page():
    tensor, _ = make_tensor()
    values = random_experts(3, 2)
    for index in (1, 0, 2):
        tensor.map(range(index, index + 1))
        tensor.write(index, values[index : index + 1])
    tensor.unmap(range(1, 2))
    for index in (0, 2):
        np.testing.assert_array_equal(read(tensor, index), values[index])
    tensor.close()


def test_what_does_not_fit_is_refused_by_name():
    tensor, _ = make_tensor()
    tensor.map(range(4, 8))
    for call, said in (
        (lambda: tensor.map(range(7, 9)), r"\[7\] are mapped already"),
        (lambda: tensor.unmap(range(7, 10)), r"\[8, 9\] are not mapped"),
        (lambda: tensor.map(range(38, 41)), "consecutive in 0..40"),
        (lambda: tensor.map(range(-1, 2)), "consecutive in 0..40"),
        (lambda: tensor.map(range(10, 20, 2)), "consecutive in 0..40"),
        (lambda: tensor.map(range(10, 10)), "consecutive in 0..40"),
        (lambda: tensor.write(7, random_experts(2, 0)), r"\[8\] are not mapped"),
        (lambda: tensor.write(4, random_experts(1, 0)[0]), "values float32"),
        (lambda: tensor.write(4, random_experts(1, 0).astype(np.float16)), "must be float32"),
        (lambda: tensor.write(4, random_experts(0, 0)), "values float32"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert tensor.mapped == (4, 5, 6, 7)
    tensor.check_integrity()
    tensor.close()
    with pytest.raises(ValueError, match="must be"):
        WeightTensor(tensor.pool, (4, 0, 2), F32)


@pytest.mark.parametrize("operation", ["create_page", "map_run"])
def test_a_failure_in_the_middle_of_a_map_undoes_all_of_it(operation):
    """Three experts between two others: a block, and a page at each end."""
    tensor, memory = make_tensor()
    for index in (1, 8):
        tensor.map(range(index, index + 1))
    values = random_experts(1, 3)
    tensor.write(8, values)
    before = tensor.mapped, tensor.bytes_mapped, tensor.pool.stats().in_use, memory.usage().mapped
    for after in range(20):
        memory.fail(operation, after)
        try:
            tensor.map(range(3, 6))
        except (OutOfPages, MappingError):
            now = (tensor.mapped, tensor.bytes_mapped, tensor.pool.stats().in_use)
            assert (*now, memory.usage().mapped) == before
            tensor.check_integrity()
            np.testing.assert_array_equal(read(tensor, 8), values[0])
            tensor.pool.trim()
        else:
            break
    assert memory.heal()
    assert after == {"create_page": 3, "map_run": 1}[operation]
    tensor.close()


def test_a_page_that_the_system_keeps_is_used_again():
    """It splits the next map into two runs; where the second fails, the first is undone."""
    tensor, memory = make_tensor()
    tensor.map(range(4, 6))
    tensor.map(range(6, 8))
    memory.fail("unmap", 1)  # of the page that both lie on
    with pytest.raises(Injected):
        tensor.unmap(range(4, 8))
    assert (tensor.mapped, tensor.bytes_mapped) == ((), PAGE)
    tensor.check_integrity()
    memory.fail("map_run", 1)
    with pytest.raises(Injected):
        tensor.map(range(4, 8))
    assert (tensor.mapped, tensor.bytes_mapped, memory.usage().mapped) == ((), PAGE, PAGE)
    tensor.check_integrity()
    tensor.map(range(4, 8))
    assert tensor.bytes_mapped == 11 * PAGE
    tensor.unmap(range(4, 8))
    assert tensor.bytes_mapped == 0
    tensor.close()


def test_the_budget_holds_and_eviction_makes_room():
    tensor, memory = make_tensor(budget=11)
    tensor.map(range(0, 3))
    with pytest.raises(OutOfPages, match="the budget is 11"):
        tensor.map(range(10, 12))
    assert tensor.mapped == (0, 1, 2)
    tensor.unmap(range(0, 3))
    memory.fail("create_page", 2)
    tensor.map(range(10, 12))
    memory.heal()
    tensor.close()


def test_unmapping_waits_for_the_step_that_may_read():
    tensor, _ = make_tensor()
    retirement = Retirement()
    tensor.map(range(0, 4))
    retirement.defer(7, lambda: tensor.unmap(range(0, 4)))
    retirement.completed(6)
    assert tensor.mapped == (0, 1, 2, 3)
    retirement.completed(7)
    assert tensor.mapped == ()
    tensor.close()


def test_closing_gives_all_back_and_disables_the_array():
    tensor, memory = make_tensor()
    array = tensor.array
    tensor.map(range(0, 4))
    assert (tensor.bytes_mapped, tensor.mapped) == (11 * PAGE, (0, 1, 2, 3))
    tensor.close()
    tensor.close()
    assert memory.usage().mapped == 0
    assert tensor.pool.stats().in_use == 0
    assert array.is_deleted()
    for call in (lambda: tensor.map(range(1)), lambda: tensor.array):
        with pytest.raises(MappingError, match="closed"):
            call()


KERNELS = """
import jax, jax.numpy as jnp, numpy as np
from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.ops.grouped_matmul import grouped_matmul
pool = PagePool(HostMemory("none"), page_bytes=4096, budget_bytes=1 << 20)
tensor = WeightTensor(pool, (40, 22, 128), np.dtype(np.float32))
rng = np.random.default_rng(0)
values = rng.standard_normal((40, 22, 128), np.float32)
sizes = np.zeros(40, np.int32)
for index, rows in ((0, 3), (7, 1), (8, 2), (33, 5)):
    tensor.map(range(index, index + 1))
    tensor.write(index, values[index:index + 1])
    sizes[index] = rows
x = jnp.asarray(rng.standard_normal((16, 128), np.float32))
step = jax.jit(lambda x, w, s: grouped_matmul(x, w, s, implementation="ffi"))
got = step(x, tensor.array, jnp.asarray(sizes))
want = step(x, jnp.asarray(values), jnp.asarray(sizes))
print("equal" if (np.asarray(got) == np.asarray(want)).all() else "different")
"""


def test_the_cpu_kernels_touch_no_hole():
    """Forbidden holes beside the experts that have rows; bits as over a whole tensor."""
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], capture_output=True, text=True, timeout=240
    )
    if "NotImplementedError" in done.stderr:
        pytest.skip("no compiler for the CPU kernels")
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr[-2000:]


def test_what_a_program_may_read_behind_an_expert_has_memory_as_long_as_it_has():
    memory = FaultyMemory(HostMemory("none"))  # pyright: ignore[reportArgumentType]
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=8 * PAGE)
    rows = WeightTensor(pool, (64, 1, 256), F32, overrun=4)  # 4 a page
    rows.map(range(0, 3))
    assert pool.stats().in_use == 2, "rows 3 to 6 may be read"
    rows.map(range(3, 9))
    assert pool.stats().in_use == 4, "rows 9 to 12"
    rows.check_integrity()
    rows.unmap(range(0, 3))
    assert pool.stats().in_use == 4, "row 3 is on the first page"
    assert rows.num_missing(range(60, 64)) == 1, "behind the last one there is nothing"
    rows.unmap(range(3, 9))
    assert pool.stats().in_use == 0
    rows.check_integrity()
    rows.close()


def test_pages_that_are_kept_stay_and_pages_come_cleared():
    pool = PagePool(HostMemory(), page_bytes=PAGE, budget_bytes=2 * PAGE)
    rows = WeightTensor(pool, (64, 1, 256), F32, cleared=True)
    rows.keep(range(0, 2))
    rows.map(range(0, 4))
    rows.write(0, np.full((4, 1, 256), np.nan, np.float32))
    rows.unmap(range(0, 4))
    assert pool.stats().in_use == 1
    rows.check_integrity()
    rows.map(range(4, 8))
    rows.write(4, np.full((4, 1, 256), np.nan, np.float32))
    rows.unmap(range(4, 8))
    rows.map(range(8, 12))
    assert not read(rows, 8).any(), "another's bytes came with the page"
    rows.close()
    assert pool.stats().in_use == 0


def test_a_negative_overrun_is_refused():
    pool = PagePool(HostMemory(), page_bytes=PAGE, budget_bytes=2 * PAGE)
    with pytest.raises(ValueError, match="overrun -1 must be at least 0"):
        WeightTensor(pool, SHAPE, F32, overrun=-1)
