"""A step's input has every chunk's numbers, and of pages those that the device has not."""

import dataclasses
import pickle

from support.drivers.scheduler_driver import Driver, limits

from serving.api.request import Request, ScheduledChunk, Sequence, StepPlan
from serving.api.sampling import Sampling
from serving.steps.step import BY_HEAD, NUM_TOKENS, START, StepSizes
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
    assert packed.values[-48:-38].tolist() == list(range(1, 11))
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


def test_each_chunk_has_its_numbers_in_the_column_of_its_row():
    """Of a chunk that scores its prompt, one with drafts, one of a task head; row 2 is free."""

    def chunk(row, slot, start, count, samples, **more):
        request = Request(str(row), (5,) * 9, Sampling(), None, "", print, 0.0, 0.0)
        sequence = Sequence(request, 0, 0, [5] * 9, row=row)
        sequence.slot = slot
        return ScheduledChunk(sequence, start, count, samples, **more)

    plan = StepPlan(
        (
            chunk(3, -1, 2, 5, False, prompt_logprobs=True),
            chunk(0, 1, 9, 3, True, drafts=(7, 8)),
            chunk(1, 0, 0, 9, False, by_head=True),
        )
    )
    sizes = dataclasses.replace(SIZES, max_drafts=3)
    made = StepInputs(sizes, 20, ()).make(plan, Program(32), in_parts=False)
    # start, tokens, slot, targets, samples, then drafts
    want = [
        [9, 3, 1, 0, 3, 7, 8, 0],
        [0, 9, 0, 0, BY_HEAD, 0, 0, 0],
        [0] * 8,
        [2, 5, -1, 5, 0, 0, 0, 0],
    ]
    assert made.table.T.tolist() == want
