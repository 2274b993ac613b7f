"""Task heads in numpy: what logits mean, and the room that heads take."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.slots import rows_per_adapter
from lora_jax.adapters.task_head import (
    SCORE,
    HeadKind,
    TaskHead,
    head_logits,
    head_width,
    with_head,
)

LOGITS = np.array([0.5, -1.0, 2.0, 2.0, 77.0], np.float32)  # the last one is past the labels


@pytest.mark.parametrize("kind", [HeadKind.CLASS, HeadKind.COUNT])
def test_one_of_the_labels(kind):
    answer = TaskHead(kind, ("0", "1", "2", "3")).answer(LOGITS)
    want = np.exp(LOGITS[:4].astype(np.float64))
    np.testing.assert_allclose(answer.probs, want / want.sum(), rtol=1e-12)
    assert (answer.index, answer.label, answer.labels, answer.text) == (2, "2", ("2",), "2")
    assert answer.logits == (0.5, -1.0, 2.0, 2.0)


def test_any_of_the_labels():
    head = TaskHead(HeadKind.MULTI_LABEL, ("a", "b", "c", "d"))
    answer = head.answer(LOGITS)
    want = 1 / (1 + np.exp(-LOGITS[:4].astype(np.float64)))
    np.testing.assert_allclose(answer.probs, want, rtol=1e-12)
    assert (answer.label, answer.labels, answer.text) == ("c", ("a", "c", "d"), "a, c, d")
    none = head.answer(np.full(4, -3, np.float32))
    assert (none.label, none.labels, none.text) == ("a", (), "")


def test_large_logits_do_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        big = np.array([-900.0, 900.0], np.float32)
        assert TaskHead(HeadKind.CLASS, ("a", "b")).answer(big).probs == (0.0, 1.0)
        assert TaskHead(HeadKind.MULTI_LABEL, ("a", "b")).answer(big).probs == (0.0, 1.0)


def test_a_head_is_a_linear_map():
    weight, state = np.arange(6.0).reshape(2, 3), np.array([1.0, -1.0, 0.5])
    np.testing.assert_array_equal(head_logits(state, weight), [0.0, 1.5])
    np.testing.assert_array_equal(head_logits(state, weight, np.array([1.0, 2.0])), [1.0, 3.5])


def test_a_head_takes_rows_for_its_labels_whatever_the_rank():
    assert [head_width(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    plain = cases.llama()
    headed = with_head(plain, 16, 3)
    assert headed.modules[SCORE].d_out == 64
    without, with_it = rows_per_adapter(plain, 2), rows_per_adapter(headed, 2)
    assert with_it[16] - without[16] == 64
    assert with_it[64] == 65  # one more for the bias


def test_boxes_are_told_where_a_label_is_more_likely_than_nothing():
    head = TaskHead(HeadKind.BOXES, ("a", "b"), 2)
    assert head.size == 14
    found, nothing = [0.0, 3.0, 1.0, 0.0, 0.0, 0.0, -9.0], [0.0, 0.0, 5.0, 0, 0, 0, 0]
    answer = head.answer(np.array([*found, *nothing, 99.0], np.float32))
    (box,) = answer.boxes
    assert (box.label, answer.label, answer.labels) == ("b", "b", ("b",))
    assert box.score == pytest.approx(np.exp(3) / (1 + np.exp(3) + np.exp(1)))
    assert answer.probs[1] == pytest.approx(box.score)
    assert box.box == pytest.approx((0.25, 0.5, 0.75, 0.5), abs=1e-3)
    assert answer.text == f"b [{', '.join(f'{side:.3f}' for side in box.box)}]"
    empty = head.answer(np.array([*nothing, *nothing], np.float32))
    assert (empty.boxes, empty.labels, empty.text) == ((), (), "")
