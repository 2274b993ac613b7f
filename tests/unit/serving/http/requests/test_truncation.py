"""truncate_prompt_tokens: which tokens stay, and which numbers are allowed."""

import pytest

from serving.http.errors import ApiError
from serving.http.requests.protocol import ChatBody, ClassifyBody, CompletionBody
from serving.http.requests.truncation import LEFT, RIGHT, Truncation, truncation_of

IDS = [1, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("truncation", "begin", "want"),
    [
        (Truncation(5), [1], IDS),
        (Truncation(3), [], [6, 7, 8]),
        (Truncation(3), [1], [1, 7, 8]),
        (Truncation(1), [1], [1]),
        (Truncation(3), [2], [6, 7, 8]),  # not what the prompt begins with
        (Truncation(3, RIGHT), [1], [1, 5, 6]),
    ],
)
def test_what_stays(truncation, begin, want):
    assert truncation.cut(IDS, begin) == want


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (CompletionBody(prompt="a"), None),
        (CompletionBody(truncation_side=RIGHT), None),
        (CompletionBody(truncate_prompt_tokens=4), Truncation(4, LEFT)),
        (CompletionBody(truncate_prompt_tokens=-1), Truncation(48, LEFT)),
        (CompletionBody(truncate_prompt_tokens=-1, max_tokens=60), Truncation(4, LEFT)),
        (CompletionBody(truncate_prompt_tokens=4, max_tokens=64), Truncation(1, LEFT)),
        (ChatBody(messages=[], truncate_prompt_tokens=-1), Truncation(63, LEFT)),
        (ClassifyBody(truncate_prompt_tokens=-1), Truncation(64, LEFT)),
        (
            ChatBody(messages=[], truncate_prompt_tokens=2, truncation_side=RIGHT),
            Truncation(2, RIGHT),
        ),
    ],
)
def test_what_a_body_asks_for(body, want):
    assert truncation_of(body, 64) == want


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 49}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
    ],
)
def test_what_is_refused(fields, param):
    with pytest.raises(ApiError, match=param) as error:
        truncation_of(CompletionBody(**fields), 64)
    assert (error.value.status, error.value.param) == (400, param)
