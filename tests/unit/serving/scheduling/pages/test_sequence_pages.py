import random
from typing import Any

import pytest

from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.pages.sequence_pages import SequencePages


def make(tokens: list[int], digest: str = "", head: Any = None, **sampling) -> Sequence:
    request = Request(
        request_id="r",
        prompt_ids=tuple(tokens),
        sampling=Sampling(**sampling),
        adapter=None,
        adapter_digest=digest,
        on_output=lambda delta: None,
        arrival_s=0.0,
        deadline_s=0.0,
        head=head,
    )
    return Sequence(request=request, index=0, seed=0, token_ids=list(tokens))


def give(pages: SequencePages, sequence: Sequence, reserve: int = 0) -> bool:
    pages.open(sequence)
    return pages.give(sequence, reserve)


def test_pages_cover_all_tokens_so_far_and_grow_by_one():
    pages = SequencePages(4, 4, enable_prefix_caching=True)
    sequence = make([1] * 8)
    assert give(pages, sequence)
    assert (len(sequence.pages), pages.usage) == (2, 0.5)
    assert pages.grow(sequence)
    assert len(sequence.pages) == 2
    sequence.num_computed = 8
    assert pages.grow(sequence)
    assert len(sequence.pages) == 3
    pages.check_integrity([sequence], [sequence])


def test_too_few_pages_change_nothing():
    pages = SequencePages(4, 4, enable_prefix_caching=True)
    first, second = make([1] * 8), make([1] * 8 + [2] * 4)
    give(pages, first)
    first.num_computed = 8
    pages.register(first)
    assert not give(pages, second, reserve=2)
    assert second.pages == []
    pages.check_integrity([first, second], [first])
    assert pages.give(second, reserve=1)
    assert (second.pages[:2], second.num_cached_tokens) == (first.pages, 8)
    second.num_computed = 12
    assert pages.grow(second)
    assert not pages.grow(make([], max_tokens=1))


def test_only_known_and_planned_tokens_are_findable():
    pages = SequencePages(8, 4, enable_prefix_caching=True)
    first = make([1] * 6)
    give(pages, first)
    first.num_computed = 7  # one past what the host knows
    pages.register(first)
    assert pages.prompt_is_findable(first)
    first.token_ids += [5, 5]
    first.num_computed = 7
    pages.take_back(first)
    second = make([1] * 6 + [5, 5, 5])
    give(pages, second)
    assert second.num_cached_tokens == 4
    assert (pages.stats.queries, pages.stats.hits) == (6 + 9, 4)


def test_a_second_run_after_preemption_counts_no_look_up():
    pages = SequencePages(8, 4, enable_prefix_caching=True)
    sequence = make([1] * 9)
    give(pages, sequence)
    sequence.num_computed = 9
    pages.take_back(sequence)
    sequence.num_preemptions = 1
    assert pages.give(sequence, 0)
    assert (sequence.num_computed, sequence.num_cached_tokens) == (8, 0)
    assert pages.stats.queries == 9


@pytest.mark.parametrize(("caching", "scores"), [(False, None), (True, 1)])
def test_no_match_without_caching_or_with_prompt_scores(caching, scores):
    pages = SequencePages(8, 4, enable_prefix_caching=caching)
    first, second = make([1] * 9), make([1] * 9, prompt_logprobs=scores)
    give(pages, first)
    first.num_computed = 9
    pages.register(first)
    give(pages, second)
    assert not pages.can_match(second)
    assert second.num_cached_tokens == 0


def test_pages_of_an_adapter_can_be_forgotten_while_others_run():
    pages = SequencePages(12, 4, enable_prefix_caching=True)
    tokens = list(range(9))
    base, bad, waiting, late = (make(tokens, digest=d) for d in ("", "bad", "bad", "bad"))
    pages.open(waiting)
    for sequence in (base, bad):
        assert give(pages, sequence)
        sequence.num_computed = len(tokens)
        pages.register(sequence)
    with pytest.raises(ValueError, match="still holds pages"):
        pages.forget_adapters({"bad"})
    pages.take_back(bad)
    pages.close(bad)
    pages.forget_adapters({"bad"})
    assert pages.give(waiting, 0)
    assert waiting.num_computed == 0
    waiting.num_computed = len(tokens)
    pages.register(waiting)
    assert give(pages, late)
    assert late.num_computed == 8  # what was computed since may be found
    again = make(tokens)
    assert give(pages, again)
    assert again.num_computed == 8


@pytest.mark.parametrize("caching", [True, False])
def test_pages_that_nobody_shall_remember_are_neither_found_nor_counted(caching):
    pages = SequencePages(8, 4, enable_prefix_caching=caching)
    pages.remember(False)
    first, second, third = (make([1] * 9) for _ in range(3))
    for one in (first, second):
        give(pages, one)
        one.num_computed = 9
        pages.register(one)
        assert (one.num_cached_tokens, pages.stats.queries) == (0, 0)
        pages.take_back(one)
    pages.remember(True)
    give(pages, third)
    assert (third.num_cached_tokens, pages.stats.queries) == (0, 9 if caching else 0)


HEAD: Any = "a head"


def run(pages: SequencePages, sequence: Sequence) -> int:
    """Let a sequence compute all its tokens and end; return how many it found."""
    assert give(pages, sequence)
    found = sequence.num_computed
    sequence.num_computed = len(sequence.token_ids)
    pages.check_integrity([sequence], [sequence])
    pages.take_back(sequence)
    pages.close(sequence)
    pages.check_integrity([], [])
    return found


@pytest.mark.parametrize(("length", "found"), [(3, 2), (8, 7), (9, 8), (10, 9), (11, 10)])
def test_a_head_computes_one_token_of_a_prompt_that_it_was_asked_before(length: int, found: int):
    pages, prompt = SequencePages(8, 4, enable_prefix_caching=True), list(range(length))
    assert run(pages, make(prompt, head=HEAD)) == 0
    assert run(pages, make(prompt, head=HEAD)) == found
    assert run(pages, make(prompt)) == (length - 1) // 4 * 4  # its next tokens need a page
    assert run(pages, make([*prompt, 99], head=HEAD)) == length // 4 * 4
    shorter = length - 2 if length % 4 == 1 else (length - 2) // 4 * 4  # a full page is known
    assert run(pages, make(prompt[:-1], head=HEAD)) == shorter
    assert run(pages, make(prompt, "another adapter", head=HEAD)) == 0
    assert pages.stats.hits == found + (length - 1) // 4 * 4 + length // 4 * 4 + shorter


def test_one_sequence_at_a_time_has_the_page_of_the_last_token():
    pages, prompt = SequencePages(8, 4, enable_prefix_caching=True), [1] * 6
    run(pages, make(prompt, head=HEAD))
    first, second = make(prompt, head=HEAD), make(prompt, head=HEAD)
    assert give(pages, first)
    assert give(pages, second)
    assert (first.num_computed, second.num_computed) == (5, 4)
    assert first.pages[-1] != second.pages[-1]
    first.num_computed = second.num_computed = 6
    for sequence in (second, first):
        pages.take_back(sequence)
        pages.close(sequence)
    pages.check_integrity([], [])
    assert run(pages, make(prompt, head=HEAD)) == 5


def test_a_prompt_that_was_not_computed_to_its_end_leaves_no_last_page():
    pages, prompt = SequencePages(8, 4, enable_prefix_caching=True), [1] * 6
    sequence = make(prompt, head=HEAD)
    assert give(pages, sequence)
    sequence.num_computed = 5
    pages.take_back(sequence)
    pages.close(sequence)
    assert run(pages, make(prompt, head=HEAD)) == 4


def test_the_page_of_the_last_token_is_of_no_use_where_one_before_it_has_gone():
    pages, prompt = SequencePages(8, 4, enable_prefix_caching=True), [1] * 11
    first = make(prompt, head=HEAD)
    assert give(pages, first)
    held, first.num_computed = list(first.pages), 11
    pages.take_back(first)
    pages.close(first)
    pages._cache.remove(held[1:2])  # as a page pool, which picks pages by their extents
    assert run(pages, make(prompt, head=HEAD)) == 4


def test_a_page_that_has_the_last_token_alone_is_not_kept():
    pages = SequencePages(8, 4, enable_prefix_caching=True)
    run(pages, make([1] * 9, head=HEAD))
    assert pages._cache.num_blank == 6


def test_pages_that_are_not_full_do_not_go_to_the_host():
    pages = SequencePages(2, 4, 0, 8, enable_prefix_caching=True)
    run(pages, make([1] * 7, head=HEAD))
    run(pages, make([2] * 8))
    assert pages.host_stats.used == 1


@pytest.mark.parametrize("seed", range(20))
def test_found_pages_hold_what_a_sequence_would_compute(seed: int):
    """In a random walk each place of a page knows the tokens up to the one it was written for."""
    chance = random.Random(seed)
    pages, size = SequencePages(12, 4, enable_prefix_caching=True), 4
    written: dict[int, list[Any]] = {page: [None] * size for page in range(12)}
    running: list[Sequence] = []
    found = 0

    def compute(sequence: Sequence, to: int) -> None:
        known = tuple(sequence.token_ids)
        for at in range(to):
            page, value = sequence.pages[at // size], known[: at + 1]
            if at < sequence.num_computed:
                assert written[page][at % size] == value
            written[page][at % size] = value
        sequence.num_computed = to

    for _ in range(300):
        if running and chance.random() < 0.5:
            sequence = running.pop(chance.randrange(len(running)))
            to = chance.choice([len(sequence.token_ids), sequence.num_computed])
            compute(sequence, to)
            pages.take_back(sequence)
            pages.close(sequence)
        elif len(running) < 3:
            prompt = [chance.randrange(2)] * chance.randrange(1, 12)
            sequence = make(prompt, head=chance.choice([None, HEAD]))
            if not give(pages, sequence):
                pages.close(sequence)
                continue
            found += sequence.num_computed % size != 0
            compute(sequence, chance.randrange(sequence.num_computed, len(prompt)) + 1)
            running.append(sequence)
            pages.register(sequence)
        pages.check_integrity(running, running)
    assert found
