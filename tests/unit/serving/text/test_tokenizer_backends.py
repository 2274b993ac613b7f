import json
import re
import threading
import time

import pytest
import sentencepiece
import tokenizers
from support.cases.tiny_tokenizers import (
    TEXTS,
    byte_fallback,
    byte_level,
    gpt2_files,
    sentencepiece_model,
    write_json,
)

from serving.text import tokenizer_backends
from serving.text.tokenizer_backends import MadeUpBackend, SentencePieceBackend, TokenizersBackend
from serving.text.tokenizer_files import TokenizerFiles


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("special", [True, False])
def test_tokenizer_json_encodes_as_the_library_does(tmp_path, make, special):
    backend = TokenizersBackend(TokenizerFiles(make(tmp_path)))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, "", "<|end|> a tool </s>"]:
        assert backend.encode(text, special) == library.encode(text, add_special_tokens=special).ids
    assert backend.vocab_size == library.get_vocab_size()
    assert backend.token(-1) is None
    assert backend.token(backend.vocab_size) is None


def test_vocab_and_merges_encode_as_the_tokenizer_json_they_came_from(tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "pair").mkdir()
    one = TokenizersBackend(TokenizerFiles(byte_level(tmp_path / "json")))
    other = TokenizersBackend(TokenizerFiles(gpt2_files(tmp_path / "pair")))
    for text in TEXTS:
        assert one.encode(text, True) == other.encode(text, True)
    assert other.special_ids == {other.token_id("<|end|>")}


def test_truncation_and_padding_of_a_tokenizer_json_are_ignored(tmp_path):
    byte_level(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=400)
    library.save(str(tmp_path / "tokenizer.json"))
    backend = TokenizersBackend(TokenizerFiles(tmp_path))
    assert 4 < len(backend.encode("x" * 50, True)) < 400


def test_special_tokens_that_only_the_config_names_are_added(tmp_path):
    config = {"added_tokens_decoder": {"301": {"content": "<|new|>", "special": True}}}
    backend = TokenizersBackend(TokenizerFiles(byte_level(tmp_path, **config)))
    assert backend.encode("<|new|>", True) == [301]
    assert backend.special_ids == {backend.token_id("<|end|>"), 301}
    assert backend.vocab_size == 302


def test_an_id_that_cannot_be_is_refused(tmp_path):
    config = {"added_tokens_decoder": {"999": {"content": "<|new|>", "special": True}}}
    with pytest.raises(ValueError, match=r"'<\|new\|>' is to have the id 999 but gets 301"):
        TokenizersBackend(TokenizerFiles(byte_level(tmp_path, **config)))


def test_a_broken_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        TokenizersBackend(TokenizerFiles(tmp_path))


def test_sentencepiece_encodes_plain_text_as_the_library_does(tmp_path):
    backend = SentencePieceBackend(TokenizerFiles(sentencepiece_model(tmp_path)))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in [*TEXTS, "", " x"]:
        assert backend.encode(text, False) == library.encode(text)
        assert backend.encode(text, True) == [library.bos_id(), *library.encode(text)]


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
    ],
)
def test_the_config_says_whether_bos_and_eos_are_added(tmp_path, config, first, last):
    backend = SentencePieceBackend(TokenizerFiles(sentencepiece_model(tmp_path, **config)))
    ids = backend.encode("a time", True)
    assert (backend.token(ids[0]) == "<s>", backend.token(ids[-1]) == "</s>") == (first, last)


@pytest.mark.parametrize(("legacy", "after"), [(False, "time"), (True, "▁time")])
def test_text_after_a_special_token_goes_on(tmp_path, legacy, after):
    backend = SentencePieceBackend(TokenizerFiles(sentencepiece_model(tmp_path, legacy=legacy)))
    ids = backend.encode("a<|im_end|>time<tool>", False)
    assert ids[1] == 340
    assert ids[-1] == 341
    assert "".join(backend.token(i) for i in ids[2:-1]) == after


def test_sentencepiece_knows_its_special_and_added_tokens(tmp_path):
    backend = SentencePieceBackend(TokenizerFiles(sentencepiece_model(tmp_path)))
    assert backend.special_ids == {0, 1, 2, 340}
    assert backend.vocab_size == 342
    assert (backend.token_id("</s>"), backend.token_id("<tool>")) == (2, 341)
    assert backend.token_id("no such piece") is None
    assert (backend.token(341), backend.token(342), backend.token(-1)) == ("<tool>", None, None)


def test_an_added_token_without_an_id_is_refused(tmp_path):
    sentencepiece_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path / "tokenizer_config.json", {**config, "pad_token": "<pad>"})
    with pytest.raises(ValueError, match="no file says the id of '<pad>'"):
        SentencePieceBackend(TokenizerFiles(tmp_path))


def test_a_made_up_vocabulary_gives_text_back_and_spells_every_id():
    backend = MadeUpBackend(300)
    ids = backend.encode("Straße <1>", True)
    assert (
        b"".join(backend.rule.later(backend.token(i) or "") for i in ids).decode() == "Straße <1>"
    )
    assert backend.token(299) == " 299"
    assert backend.token(300) is None
    assert backend.token(-1) is None
    assert max(MadeUpBackend(7).encode("xyz", True)) < 7


@pytest.mark.parametrize("added", [["<a>"], ["<a>", "<ab>", "<"], ["x" * 40, "<a>"], []])
def test_texts_are_split_at_added_tokens_wherever_windows_end(added, monkeypatch):
    """As one search over the whole text would, which would hold the interpreter lock."""
    monkeypatch.setattr(tokenizer_backends, "_WINDOW", 7)
    splitter = tokenizer_backends._Splitter(added)
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    for text in ("", "<a>", "b<a><ab><", "x" * 100 + "<a>" + "x" * 39 + "<", "abcdef<ab>g<a" * 9):
        want = re.split(f"({pattern})", text) if added else [text]
        assert splitter.split(text) == want


def test_encoding_lets_other_threads_run(tmp_path):
    """`encode` of the library holds the interpreter lock throughout, `encode_batch_fast` not.

    One that holds it does so at each try; other processes do not take the cores at each.
    """
    backend = TokenizersBackend(TokenizerFiles(byte_level(tmp_path)))
    text = "some words of a text " * 20_000
    assert backend.encode(text, True) == backend._tokenizer.encode(text).ids
    assert any(longest_gap_of(lambda: backend.encode(text, True)) < 0.5 for _ in range(10))


def longest_gap_of(call) -> float:
    """Return the longest time in which no other thread ran, as a part of the call's time."""
    done, gaps = threading.Event(), []

    def watch() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    return max(gaps, default=seconds) / seconds


def test_the_longest_token_in_characters(tmp_path):
    assert TokenizersBackend(TokenizerFiles(byte_level(tmp_path))).longest_token == len("<|end|>")
    assert MadeUpBackend(300).longest_token == 1
