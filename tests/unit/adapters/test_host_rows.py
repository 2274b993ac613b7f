"""Matrices that follow each other in memory are one run of rows."""

import numpy as np

from lora_jax.adapters.host_rows import host_runs


def test_matrices_of_one_block_are_a_run_for_each_width_and_others_stay_apart():
    block = np.arange(60, dtype=np.float32)
    inside = [block[start : start + 8].reshape(1, 2, 4) for start in (0, 8, 24)]
    wide, other = block[32:44].reshape(2, 1, 6), np.ones((1, 3, 4), np.float32)
    runs = host_runs([inside[0], wide, inside[1], inside[2], other])
    found = [(run.width, run.numbers, run.counts, run.rows.shape) for run in runs]
    assert found == [
        (4, (0, 2), (2, 2), (4, 4)),
        (4, (3,), (2,), (2, 4)),
        (4, (4,), (3,), (3, 4)),
        (6, (1,), (2,), (2, 6)),
    ]
    assert runs[0].rows.tobytes() == block[:16].tobytes()
    assert not runs[0].rows.flags.writeable
