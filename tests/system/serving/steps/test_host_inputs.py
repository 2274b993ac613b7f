"""Tables and masks come to the device as they were given, at their old addresses where in place."""

import dataclasses

import jax
import numpy as np
import pytest

from serving.steps.host_inputs import HostInputs, largest_bytes, make_holes
from serving.steps.step import StepSizes

SIZES = StepSizes(max_seqs=4, max_len=640, page_size=4, num_pages=99, max_logit_rows=8, max_rank=4)


@pytest.mark.parametrize("in_place", [False, True])
def test_new_pages_are_in_their_rows_before_the_step(in_place):
    rng = np.random.default_rng(in_place)
    inputs = HostInputs(SIZES, jax.device_put, in_place=in_place)
    want = rng.integers(0, 99, (SIZES.max_seqs, SIZES.max_pages), np.int32)
    inputs.set_pages(want)
    table = np.zeros((SIZES.table_rows, SIZES.max_seqs), np.int32)
    inputs.set_table(table)
    addresses = set()
    for count in (0, 1, 9, 3 * SIZES.max_pages // SIZES.max_seqs, SIZES.max_pages):
        for row in range(SIZES.max_seqs):
            first = int(rng.integers(0, SIZES.max_pages - count + 1))
            pages = rng.integers(0, 99, count, np.int32)
            inputs.add_pages(row, first, pages)
            want[row, first : first + count] = pages
        table = rng.integers(0, 99, table.shape, np.int32)
        np.testing.assert_array_equal(inputs.set_table(table), table)
        np.testing.assert_array_equal(inputs.pages, want)
        arrays = [inputs.table, inputs.pages] if in_place else []
        addresses.add(tuple(array.unsafe_buffer_pointer() for array in arrays))
    assert len(addresses) == 1


def test_large_block_tables_go_to_the_device_of_a_cpu_by_a_copy():
    sizes = dataclasses.replace(SIZES, max_seqs=64)
    inputs = HostInputs(sizes, jax.device_put, in_place=False)
    inputs.add_pages(63, 5, np.array([7, 8], np.int32))
    inputs.set_table(np.zeros((sizes.table_rows, sizes.max_seqs), np.int32))
    assert isinstance(inputs.pages, jax.Array)
    assert inputs.pages[63, 4:8].tolist() == [0, 7, 8, 0]


def test_masks_are_written_over_those_of_before():
    inputs = HostInputs(SIZES, jax.device_put, in_place=True)
    inputs.set_masks(np.arange(8, dtype=np.int32))  # a CPU may take numpy's own memory
    first = inputs.set_masks(np.arange(8, 16, dtype=np.int32)).unsafe_buffer_pointer()
    second = inputs.set_masks(np.arange(16, 24, dtype=np.int32))
    assert second.unsafe_buffer_pointer() == first
    np.testing.assert_array_equal(second, np.arange(16, 24))


@pytest.mark.parametrize(
    ("largest", "kept_bytes"),
    [(None, 9_584_640), (100_000, 9_584_640), (32_769, 9_584_640), (32_768, 1_196_032)],
)
def test_places_are_left_for_arrays_as_large_as_come(largest, kept_bytes):
    """The arrays that keep the places apart are as large together as the places."""
    kept = make_holes(jax.device_put, largest)
    assert sum(array.nbytes for array in kept) == kept_bytes


def test_the_largest_array_of_a_step_is_a_row_its_pages_its_results_or_its_masks():
    """A row of the sampling state has 3,093 numbers beside its tokens."""
    assert largest_bytes(SIZES, 0) == 4 * (1 + 3093 + 640)
    assert largest_bytes(SIZES, 32_000) == 4 * (SIZES.num_masks * 1000 + 8)
    many = dataclasses.replace(SIZES, max_seqs=64, max_logit_rows=64)
    assert largest_bytes(many, 0) == 4 * 64 * 160
    scored = dataclasses.replace(SIZES, max_logit_rows=1024)
    assert largest_bytes(scored, 0) == 4 * 1024 * 20
