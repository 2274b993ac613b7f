"""The jitted functions of a step: their names in programs, and that they hold no weights."""

import gc
import weakref

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.models import load
from serving.steps.sampling import sampler
from serving.steps.step import StepSizes
from serving.steps.step_functions import jit_steps

SIZES = StepSizes(max_seqs=4, max_len=32, page_size=4, num_pages=20, max_logit_rows=8, max_rank=4)


@pytest.fixture
def model(tmp_path):
    tiny_checkpoint.write_model(tmp_path, TinyShape())
    return load(tmp_path)[0]


def jitted(model):
    return jit_steps(model, SIZES, None, sampler.sample, None, None, None)


def test_programs_are_named_after_the_step_and_its_parts(model):
    functions, _ = jitted(model)
    assert [f.__name__ for f in functions] == ["step", "forward", "sample_part"]


def test_functions_hold_no_weights(tmp_path):
    tiny_checkpoint.write_model(tmp_path, TinyShape())
    functions, leaves = jitted(load(tmp_path)[0])
    held = [weakref.ref(leaf) for leaf in leaves]
    assert all(one() is not None for one in held)
    del leaves
    gc.collect()
    assert all(functions)
    assert [one for one in held if one() is not None] == []
