import dataclasses

import jax
import jax.numpy as jnp
import pytest

from serving.steps.forwarded import no_heads, no_logits
from serving.steps.step import StepSizes

SIZES = StepSizes(max_seqs=4, max_len=32, page_size=4, num_pages=20, max_logit_rows=8, max_rank=4)


@pytest.mark.parametrize("bucket", [4, 32])
def test_a_forward_part_that_brought_nothing_has_the_rows_of_its_bucket(bucket):
    nothing = no_logits(SIZES, bucket, 10)
    rows = SIZES.logit_rows(bucket)
    assert nothing.logits.shape == (rows, 10)
    count, *columns = jax.tree.leaves(nothing.rows)
    assert count == 0
    assert {(c.shape, c.dtype) for c in columns} == {((rows,), jnp.dtype("int32"))}
    assert nothing.heads is None


def test_logits_of_heads_are_there_where_the_model_has_heads():
    assert no_heads(SIZES) is None
    heads = no_heads(dataclasses.replace(SIZES, head_width=3))
    assert heads is not None
    assert heads.shape == (4, 3)
