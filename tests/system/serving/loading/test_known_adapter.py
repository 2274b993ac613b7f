"""Names and requests of one adapter say whether others may go for its sake."""

from support.cases import adapter_cases as cases

from serving.loading.known_adapter import RATE_S, KnownAdapter


def test_names_keep_it_and_one_of_them_may_pin_it():
    made = KnownAdapter(cases.weights(cases.llama(), 2, seed=1))
    assert (made.named, made.pinned, made.wanted) == (False, False, False)
    made.names |= {"a": False}
    assert (made.named, made.pinned, made.wanted) == (True, False, False)
    made.names |= {"b": True}
    assert (made.pinned, made.wanted) == (True, True)
    made.names, made.requests = {}, 1
    assert (made.named, made.pinned, made.wanted) == (False, False, True)


def test_older_requests_count_less():
    made = KnownAdapter(cases.weights(cases.llama(), 2, seed=1))
    made.arrive(0.0)
    made.arrive(0.0)
    assert made.rate(0.0) == 2
    assert 0.7 < made.rate(RATE_S) < 0.75
    made.arrive(RATE_S)
    assert 1.7 < made.rate(RATE_S) < 1.75
