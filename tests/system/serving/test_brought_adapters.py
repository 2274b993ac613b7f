"""Adapters with more than LoRA in one batch: PEFT's log-probabilities, and nobody else's bits."""

import numpy as np
import pytest
from support.cases import brought_cases
from support.cases.brought_cases import FAMILIES, adapter_names, answers, expected

TOLERANCE = 1e-3  # of log-probabilities in float32


FURTHER = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name != "qwen2"]
ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-gpu") for name in FAMILIES]


@pytest.fixture(scope="module", params=["qwen2", *FURTHER, *ON_A_GPU])
def case(request, tmp_path_factory):
    """A family, its engine, and what it answers to each adapter in one batch."""
    family = request.param
    with brought_cases.make_engine(tmp_path_factory.mktemp(family), family) as engine:
        prompts, wanted = expected(family)
        names = [None, *adapter_names(family)]
        asked = [(prompt, name) for name in names for prompt in prompts]
        yield family, engine, asked, answers(engine, asked), wanted


def test_log_probabilities_are_those_of_peft(case):
    _, engine, asked, together, wanted = case
    for (prompt, name), (got, _, _) in zip(asked, together, strict=True):
        want = wanted[name or "base"][0 if len(prompt) == 13 else 1]
        np.testing.assert_allclose(got, want, atol=TOLERANCE, err_msg=str(name))
    # The adapters do something, each something else.
    of_first = {name: tuple(each[0]) for (_, name), each in zip(asked, together, strict=True)}
    assert len(set(of_first.values())) == len(of_first)
    assert engine.stats().compilations_after_warmup == 0


def test_alone_is_bit_equal_to_in_a_batch(case):
    _, engine, asked, together, _ = case
    alone = [answers(engine, [one])[0] for one in asked]
    assert alone == together
    assert engine.stats().compilations_after_warmup == 0
