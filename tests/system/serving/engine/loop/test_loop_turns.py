"""The loop around a step: turns of the device, cold programs and token masks."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.cases.loop_cases import Case
from support.cases.loop_ends import ended
from support.doubles.loop_doubles import Turns
from support.waiting import wait_until

from serving.api.request import (
    FinishReason,
    SequenceState,
    StepPlan,
)
from serving.api.sampling import Sampling
from serving.engine.loop import loop as engine_loop
from serving.engine.loop.loop import EngineLoop
from serving.steps.sampling.mask_board import MaskBoard
from serving.steps.sampling.sampler import INVALID_TOKEN
from serving.steps.step import StepSizes
from serving.steps.step_results import InFlightStep
from serving.text.structured.row_masks import RowMasks


def test_cold_programs_run_in_idle_times_but_never_without_a_turn(case, tokenizer):
    wait_until(lambda: case.runner.asked_cold)
    order, is_free = [], threading.Event()

    def take_idle(woken):
        order.append("asked")
        while not (is_free.is_set() or woken()):
            time.sleep(0.001)
        return is_free.is_set()

    turns = Turns(order, is_due=False)
    turns.take, turns.take_idle = lambda *_: None, take_idle
    sharing = Case(tokenizer, turns=turns)
    sharing.runner.order, sharing.runner.has_cold = order, True
    sharing.loop.wake()
    wait_until(lambda: "asked" in order)
    _, deltas = sharing.ask(max_tokens=1)  # a call comes while others have the device
    wait_until(lambda: ended(deltas))
    assert "cold" not in order
    is_free.set()
    sharing.loop.wake()
    wait_until(lambda: "cold" in order and order[-1] == "given back")
    assert order[order.index("cold") - 1 :][:3] == ["asked", "cold", "given back"]
    sharing.loop.close()
    sharing.compilations.close()


def test_callers_have_their_tokens_before_the_next_turn(tokenizer, monkeypatch):
    monkeypatch.setattr(StepPlan, "has_drafts", property(lambda _: True))  # so it is read early
    order, told = [], []
    turns = Turns(order, is_due=True)
    turns.give_back = lambda: None
    sharing = Case(tokenizer, turns=turns)
    sharing.runner.order = order
    sharing.ask(max_tokens=4, on_output=lambda delta: order.append("told") or told.append(delta))
    wait_until(lambda: ended(told))
    assert " ".join(order).count("read told taken") == 3
    sharing.loop.close()
    sharing.compilations.close()


def test_a_turn_is_passed_on_while_its_last_step_runs(tokenizer):
    """The next holder plans and dispatches meanwhile; callers wait for neither."""
    order, told = [], []
    sharing = Case(tokenizer, turns=Turns(order, is_due=True))
    sharing.runner.order = order
    sharing.ask(max_tokens=3, on_output=lambda delta: order.append("told") or told.append(delta))
    wait_until(lambda: ended(told))
    turn = ["taken", "dispatch", "passed on", "read", "given back", "told"]
    assert order[order.index("taken") :][:12] == turn * 2
    sharing.loop.close()
    assert order[-3:] == ["wait", "closed", "freed"]  # nothing runs when others have the device
    sharing.compilations.close()


def test_a_step_that_waits_for_masks_is_read_before_its_turn_is_given_back(tokenizer):
    """It may have the device while it waits for the host."""
    loop, order = EngineLoop.__new__(EngineLoop), []
    loop._flying, loop._early, loop._lock = SimpleNamespace(waits=True), None, threading.Lock()
    loop._parts = SimpleNamespace(scheduler=SimpleNamespace(has_work=True))
    loop._read_results = lambda step: order.append("read") or []
    loop._hand_out = lambda progress: order.append("told")
    loop._take_turn(Turns(order, is_due=True))
    assert order == ["read", "given back", "told", "taken"]


def test_masks_that_are_made_late_are_posted_for_their_own_step():
    posted, may = [], threading.Event()
    host = SimpleNamespace(address=None, values=np.zeros(99, np.int32), post=posted.append)
    board = MaskBoard(host, StepSizes(2, 8, 4, 9, 2, 4), 70)
    masks = RowMasks(())
    masks._few, masks._fill = 0, lambda *_: may.wait(60)  # another thread's work
    loop, plan = EngineLoop.__new__(EngineLoop), SimpleNamespace(chunks=())
    loop._parts = SimpleNamespace(
        runner=SimpleNamespace(board=board), grammars=SimpleNamespace(masks=masks)
    )
    loop._post_masks(plan, [], board.take_number())
    next_number = board.take_number()  # the next step goes out meanwhile
    assert posted == []
    may.set()
    wait_until(lambda: posted)
    assert (posted, next_number) == ([1], 2)
    masks.close()


@pytest.mark.parametrize("cores", [2, 8])
def test_beside_a_step_that_has_masks_a_plan_on_few_cores_waits(cores, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    loop, asked = EngineLoop.__new__(EngineLoop), []
    grammars = SimpleNamespace(masks=RowMasks(()))
    loop._parts = SimpleNamespace(grammars=grammars, turns=None)
    loop._pacer = SimpleNamespace(wait_s=lambda tokens, late: asked.append((tokens, late)) or 0.0)
    for waits, rows in ((True, 64), (True, 8), (False, 64)):
        plan = SimpleNamespace(num_tokens=rows, chunks=[None] * rows)
        loop._flying = SimpleNamespace(plan=plan, waits=waits)
        loop._wait_to_plan()
    assert asked == [(64, cores == 2), (8, False), (64, False)]


def test_nobody_is_told_of_an_end_before_the_masks_of_the_next_step_are_asked_for(case):
    """What a caller's end frees may have the driver wait for the device, which waits for masks."""
    loop, order = EngineLoop.__new__(EngineLoop), []
    last = case.loop
    sequence = SimpleNamespace(state=SequenceState.RUNNING, num_discarded=0)
    sequence.request = SimpleNamespace(sampling=Sampling())
    result = SimpleNamespace(token_id=INVALID_TOKEN, chunk=SimpleNamespace(sequence=sequence))
    plan = SimpleNamespace(is_bound=False, num_tokens=1, chunks=(), has_drafts=False)
    loop._flying = SimpleNamespace(plan=plan, remote_status=None)
    plan = SimpleNamespace(is_bound=True, is_short=False, chunks=())
    bound = InFlightStep(plan, (), None, scored=False, number=1, waits=True)
    runner = SimpleNamespace(read=lambda step: [result])
    books = SimpleNamespace(
        finish=lambda one, reason: order.append("finish"), complete=lambda *_: []
    )
    parts = dataclasses.replace(last._parts, runner=runner, scheduler=books)
    loop._parts, loop._lock, loop._pacer = parts, threading.Lock(), last._pacer
    loop._planned = engine_loop._Planned(bound.plan, [sequence], [])
    loop._failed, loop._untold, loop._early, loop.num_steps = [], [], None, 0
    loop._send = lambda plan, now: bound
    loop._post_masks = lambda *_: order.append("masks")
    loop._live = SimpleNamespace(end=lambda one, reason, *_, **__: order.append(reason))
    loop._iterate()
    assert order == ["finish", "masks", FinishReason.ABORT, FinishReason.ERROR]
