"""The token with which a sequence ends."""

import pytest

from serving.api.request import FinishReason, Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.endings import ending


@pytest.mark.parametrize(
    ("outputs", "sampling", "want"),
    [
        ([5], {}, (None, None)),
        ([0], {}, (FinishReason.STOP, None)),
        ([0], {"ignore_eos": True}, (None, None)),
        ([0], {"min_tokens": 2}, (None, None)),
        ([5, 0], {"min_tokens": 2}, (FinishReason.STOP, None)),
        ([7], {"stop_token_ids": [7]}, (FinishReason.STOP, 7)),
        ([5, 5, 5, 5], {}, (FinishReason.LENGTH, None)),
        ([5, 5, 5, 0], {}, (FinishReason.STOP, None)),
    ],
)
def test_reasons(outputs, sampling, want):
    settings = Sampling(max_tokens=4, **sampling)
    request = Request("r", (1, 2), settings, None, "", lambda delta: None, 0.0, 0.0)
    sequence = Sequence(request, 0, 0, [1, 2, *outputs], max_outputs=4)
    assert ending(sequence, outputs[-1], {0}) == want
