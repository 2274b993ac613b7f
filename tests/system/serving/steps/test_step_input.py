"""A step's input has every chunk's numbers, and of pages those that the device has not."""

import pickle

from support.drivers.scheduler_driver import Driver, limits

from serving.steps.step import NUM_TOKENS, START, StepSizes
from serving.steps.step_input import StepInputs, is_scored
from serving.steps.step_programs import Program

SIZES = StepSizes(max_seqs=4, max_len=48, page_size=4, num_pages=16, max_logit_rows=8, max_rank=4)


def inputs_of(driver):
    """The input of each step until the driver has nothing to do, as another process gets it."""
    inputs, program = StepInputs(SIZES, 20, (0,)), Program(12)
    made = []
    while (plan := driver.step()) is not None:
        one = inputs.make(plan, program, in_parts=False)
        made.append((plan, pickle.loads(pickle.dumps(one))))
    return made


def test_pages_go_out_once_and_rows_when_they_are_admitted():
    driver = Driver(limits(max_num_batched_tokens=6))
    driver.add(range(1, 11), ignore_eos=True)
    (first_plan, first), *rest = inputs_of(driver)
    ((row, packed),) = first.admitted
    assert packed.ints[-48:-38].tolist() == list(range(1, 11))
    assert first.table[[START, NUM_TOKENS], row].tolist() == [0, 6]
    pages = first.pages[0].pages.tolist()
    for _, one in rest:
        assert not one.admitted
        for new in one.pages:
            assert (new.row, new.first) == (row, len(pages))
            pages += new.pages.tolist()
    assert len(set(pages)) == len(pages) == 4  # for 10 tokens and the 5 answers before the last
    assert any(not one.pages for _, one in rest)
    assert first.program == Program(12)
    assert not is_scored(first_plan)


def test_a_row_that_is_taken_over_gets_all_of_its_pages():
    driver = Driver(limits())
    driver.add([1] * 9, max_tokens=1, salt="a")
    driver.add([2] * 9, max_tokens=1, salt="b", logprobs=1, deadline_s=9.0)
    made = [(plan, one) for plan, one in inputs_of(driver) if one.admitted]
    assert {new.first for _, one in made for new in one.pages if one.admitted} >= {0}
    assert any(is_scored(plan) for plan, _ in made)


def test_an_empty_table_has_no_rows():
    table = StepInputs(SIZES, 20, ()).empty_table()
    assert table.shape == (SIZES.table_rows, 4)
    assert not table.any()
