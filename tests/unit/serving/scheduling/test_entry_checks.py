"""Conditions of a request before it is queued."""

import pytest
from support.drivers.scheduler_driver import limits

from serving.api.request import Request
from serving.api.sampling import Sampling
from serving.scheduling.entry_checks import check_fits


def request(length: int, max_tokens: int) -> Request:
    sampling = Sampling(max_tokens=max_tokens, prompt_logprobs=None if max_tokens else 0)
    return Request("r", (1,) * length, sampling, None, "", lambda delta: None, 0.0, 0.0)


@pytest.mark.parametrize(
    ("length", "max_tokens", "problem"),
    [(0, 1, "no tokens"), (48, 1, "length"), (49, 0, "length"), (30, 18, "need 12 KV pages")],
)
def test_what_no_step_could_hold_is_refused(length, max_tokens, problem):
    with pytest.raises(ValueError, match=problem):
        check_fits(request(length, max_tokens), limits(num_pages=11))


def test_what_fits_passes():
    check_fits(request(47, 1), limits())
    check_fits(request(48, 0), limits())
