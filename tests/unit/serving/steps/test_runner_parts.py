"""Parts of a model runner, and what they say of themselves."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from serving.steps.runner_parts import NO_ADAPTERS, ProgramChoice, StepAdapters


def test_adapters_count_experts_slots_and_say_whether_they_bring_more_than_lora():
    assert (NO_ADAPTERS.num_esft, NO_ADAPTERS.brings) == (0, False)
    tables = np.zeros((2, 3, 8), np.int32)  # layers, slots, experts
    assert StepAdapters(reroute_tables=tables).num_esft == 3
    for token_ids, brings in ((None, False), (np.zeros(4), True)):
        assert StepAdapters(slots=SimpleNamespace(token_ids=token_ids)).brings is brings


@pytest.mark.parametrize(("is_masked", "has_board"), [(True, True), (False, False)])
def test_steps_wait_at_a_board_only_if_they_are_masked(is_masked, has_board):
    board = object()
    choice = ProgramChoice(8, structured_outputs=is_masked, board=board)
    assert (choice.mask_board is board) is has_board


@pytest.mark.parametrize(("said", "backend", "want"), [
    (None, "cpu", False), (None, "gpu", True), (True, "cpu", True), (False, "gpu", False)
])  # fmt: skip
def test_steps_are_in_place_where_that_was_said_or_the_device_is_no_cpu(
    monkeypatch, said, backend, want
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert ProgramChoice(8, in_place=said).is_in_place is want
