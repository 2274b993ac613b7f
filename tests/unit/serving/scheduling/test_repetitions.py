"""Repetitions against a search through all places."""

import random

import pytest

from serving.scheduling.repetitions import WINDOW, Repetitions


def index(tokens, low, high):
    """All tokens one after the other, as a sequence gets them."""
    grown: list[int] = []
    repetitions = Repetitions(grown, low, high)
    for token in tokens:
        grown.append(token)
        repetitions.extend(len(grown))
    return repetitions


def longest(tokens, low, high):
    """The latest place after the longest repetition, by looking at every place."""
    best = (0, -1)
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[-1 - length] and length < high:
            length += 1
        if length >= low:
            best = max(best, (length, end + 1))
    return best[1]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_repetition_is_found_the_latest_one_first(seed):
    rng = random.Random(seed)
    low = rng.randrange(1, 4)
    high = low + rng.randrange(3)
    tokens: list[int] = []
    repetitions = Repetitions(tokens, low, high)
    for _ in range(60):
        tokens.append(rng.randrange(6))
        repetitions.extend(len(tokens))
        want = longest(tokens, low, high)
        if sum(tokens[i : i + low] == tokens[-low:] for i in range(len(tokens) - low)) > 8:
            continue  # only the latest eight places are compared
        assert repetitions.next_token == (tokens[want] if want > 0 else None)


def test_what_followed_is_given_and_a_period_goes_on():
    repetitions = index([1, 2, 3, 4, 5, 9, 2, 3], 2, 4)
    assert repetitions.following(3) == [4, 5, 9]
    assert index([7, 8, 7, 8, 7, 8], 2, 2).following(5) == [7, 8, 7, 8, 7]
    assert index([1, 2, 3], 1, 4).following(4) == []
    assert index([1, 2, 3], 1, 4).next_token is None


def test_a_long_prompt_is_known_from_its_end():
    tokens = [1, 2, 3, *range(10, 10 + WINDOW), 1, 2]
    repetitions = Repetitions(tokens, 2, 3)
    first = repetitions.num_known
    assert repetitions.extend(len(tokens)) == []
    assert first == len(tokens) - WINDOW
    assert repetitions.next_token is None  # what stands before is not known
    tokens += [10 + WINDOW - 3, 10 + WINDOW - 2]
    assert repetitions.extend(len(tokens)) == []  # none was expected
    assert repetitions.next_token == 10 + WINDOW - 1
    tokens += [10 + WINDOW - 1, 9]
    assert repetitions.extend(len(tokens)) == [True, False]
