import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases.tiny_tokenizers import KINDS, byte_fallback, byte_level

from serving.api.sampling import Sampling
from serving.text.detokenizer import Detokenizer
from serving.text.tokenizer import Tokenizer

PROPERTY = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(KINDS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A tokenizer whose tokens are mostly single characters."""
    return Tokenizer(byte_level(tmp_path_factory.mktemp("letters")))


def run(tokenizer, ids, prompt_ids=(), **sampling):
    """Push all tokens; returns the pieces and the stop string."""
    sampling = {"max_tokens": 1000, **sampling}
    detokenizer = Detokenizer(tokenizer, prompt_ids, Sampling(**sampling))
    pieces = []
    for token in ids:
        piece, stop = detokenizer.push(token)
        pieces.append(piece)
        if stop is not None:
            assert detokenizer.finish() == ""
            return pieces, stop
    return [*pieces, detokenizer.finish()], None


@PROPERTY
@given(numbers=st.lists(st.integers(0, 2**20), max_size=30), skip=st.booleans())
def test_pieces_add_up_to_the_decoded_text(tokenizer, numbers, skip):
    ids = [number % (tokenizer.vocab_size + 2) for number in numbers]
    pieces, stop = run(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert stop is None


@PROPERTY
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30))
def test_a_text_comes_in_whole_characters(tokenizer, text):
    pieces, _ = run(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


@PROPERTY
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_a_stop_string_ends_the_text_where_it_is_complete_first(letters, text, stops, include):
    ids = [letters.encode(char)[0] for char in text]
    pieces, stop = run(letters, ids, stop=stops, include_stop_str_in_output=include)
    met = [(n, s) for n in range(len(text) + 1) for s in stops if text[:n].endswith(s)]
    if not met:
        assert (stop, "".join(pieces)) == (None, text)
        return
    end = met[0][0]
    longest = max((s for n, s in met if n == end), key=len)
    assert stop == longest
    assert "".join(pieces) == text[: end if include else end - len(longest)]
    assert len(pieces) == end  # found with the very token that completes it


@PROPERTY
@given(text=st.text("ab ", max_size=20), stop=st.text("ab ", min_size=1, max_size=4))
def test_where_a_stop_string_is_found_does_not_depend_on_the_borders_of_tokens(
    tokenizer, letters, text, stop
):
    by_letter = run(letters, [letters.encode(char)[0] for char in text], stop=[stop])
    by_token = run(tokenizer, tokenizer.encode(text), stop=[stop])
    assert ("".join(by_letter[0]), by_letter[1]) == ("".join(by_token[0]), by_token[1])


def test_text_that_may_become_a_stop_string_is_held_back_and_no_more(letters):
    ids = [letters.encode(char)[0] for char in "xSTxSTOP"]
    pieces, stop = run(letters, ids, stop=["STOP"])
    assert pieces == ["x", "", "", "STx", "", "", "", ""]
    assert stop == "STOP"


def test_held_back_text_comes_at_the_end(letters):
    ids = [letters.encode(char)[0] for char in "xST"]
    pieces, stop = run(letters, ids, stop=["STOP"])
    assert (pieces, stop) == (["x", "", "", "ST"], None)


def test_a_stop_string_across_bytes_of_one_character(tmp_path):
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    ids = [3 + byte for byte in "a🎉b".encode()]
    pieces, stop = run(tokenizer, ids, stop=["🎉"])
    assert ("".join(pieces), stop) == ("a", "🎉")
    assert len(pieces) == 5


def test_stop_strings_do_not_count_before_min_tokens(letters):
    ids = [letters.encode(char)[0] for char in "ababab"]
    pieces, stop = run(letters, ids, stop=["ab"], min_tokens=3)
    assert ("".join(pieces), stop) == ("ab", "ab")
    pieces, stop = run(letters, ids, stop=["ab"], min_tokens=4)
    assert ("".join(pieces), stop) == ("abab", "ab")  # the one that ends at 4 began before


def test_the_prompt_decides_about_the_first_space(tmp_path):
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    answer = tokenizer.encode("to", add_special_tokens=False)
    assert "".join(run(tokenizer, answer, tokenizer.encode(""))[0]) == "to"
    assert "".join(run(tokenizer, answer, tokenizer.encode("x"))[0]) == " to"


def test_nothing_may_follow_the_end(letters):
    detokenizer = Detokenizer(letters, (), Sampling())
    detokenizer.finish()
    with pytest.raises(ValueError, match="has ended"):
        detokenizer.push(1)
    assert detokenizer.finish() == ""
