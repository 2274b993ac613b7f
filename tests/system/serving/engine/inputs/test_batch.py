"""Prompts go in as the queue takes them, answers come out in order."""

import itertools

import pytest

from serving.api.outputs import RequestFailed
from serving.api.request import FinishReason, OutputDelta, QueueFull
from serving.api.sampling import Sampling
from serving.engine.inputs.batch import Batch


class TwoAtATime:
    """An engine whose queue holds two requests; a refused one makes it answer the oldest."""

    def __init__(self):
        self.waiting, self.ids, self.refusals = [], itertools.count(), 0

    def submit(self, prompt, adapter, sampling, *, on_output):
        if prompt == [13]:
            raise ValueError("unlucky")
        if len(self.waiting) == 2:
            self.refusals += 1
            self.answer(self.waiting.pop(0))
            raise QueueFull("Full.", 0.0)
        request_id = str(next(self.ids))
        self.waiting.append((request_id, prompt, sampling, on_output))
        if len(self.waiting) == 2 and prompt[0] >= 90:
            for item in self.waiting:
                self.answer(item)
            self.waiting.clear()
        return request_id

    def answer(self, item):
        request_id, prompt, sampling, on_output = item
        for index in range(sampling.n):
            on_output(OutputDelta(request_id, index, "t", (prompt[0],)))
            reason = FinishReason.ERROR if prompt[0] == 99 else FinishReason.STOP
            on_output(OutputDelta(request_id, index, "u", (), finish_reason=reason, error="bad"))


def make_batch(prompts, engine=None, **kwargs):
    count = len(prompts)
    engine = engine or TwoAtATime()
    samplings = [Sampling(n=2)] * count
    return Batch(engine.submit, prompts, [None] * count, samplings, use_tqdm=False, **kwargs)


def test_a_full_queue_is_waited_for_and_order_is_kept():
    engine = TwoAtATime()
    prompts = [[i] for i in range(6)] + [[90]]  # with 90 all that wait are answered
    outputs = make_batch(prompts, engine).run()
    assert [output.prompt_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert all(o.outputs[1].token_ids == o.prompt_ids for o in outputs)
    assert engine.refusals > 0


def test_one_failure_raises_after_all_have_ended():
    batch = make_batch([[99], [90]])
    with pytest.raises(RequestFailed, match="bad"):
        batch.run()
    assert not batch.live


def test_a_refused_prompt_leaves_the_others_to_be_aborted():
    batch = make_batch([[1], [13]])
    with pytest.raises(ValueError, match="unlucky"):
        batch.run()
    assert batch.live == {0: "0"}


def test_the_bar_shows_both_speeds(capsys):
    batch = Batch(TwoAtATime().submit, [[90], [91]], [None] * 2, [Sampling()] * 2, use_tqdm=True)
    batch.run()
    shown = capsys.readouterr().err
    assert "est. speed input: " in shown
    assert " toks/s, output: " in shown
