import gzip
import json
import random

import pytest
import sentencepiece
import tokenizers
from support.cases.tiny_tokenizers import (
    KINDS,
    TEXTS,
    byte_fallback,
    byte_level,
    sentencepiece_model,
    write_json,
)

from serving.text.token_text import TextStream
from serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer(KINDS[request.param](tmp_path_factory.mktemp(request.param)))


def test_text_comes_back(tokenizer):
    for text in [*TEXTS, "", "�", "\ue000", "x" * 300]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_short_text_that_comes_again_is_encoded_once(tokenizer, monkeypatch):
    wanted, calls = [tokenizer.encode(text) for text in TEXTS], []
    encode = tokenizer._backend.encode
    monkeypatch.setattr(tokenizer._backend, "encode", lambda *a: calls.append(a) or encode(*a))
    for text, ids in zip(TEXTS, wanted, strict=True):
        tokenizer.encode_again(text).clear()  # a caller may change its list
        assert tokenizer.encode_again(text) == ids
    assert len(calls) == len(set(TEXTS))
    assert len(tokenizer.encode_again("ab " * 200)) == len(tokenizer.encode_again("ab " * 200))
    assert len(calls) == len(set(TEXTS)) + 2


@pytest.mark.parametrize("at_start", [True, False])
def test_texts_that_a_stream_knows_are_those_of_the_rule(tokenizer, at_start):
    """Tokens in any order, so that characters begin and end in their midst."""
    backend, rng, prompt = tokenizer._backend, random.Random(0), tokenizer.encode("x")
    for _ in range(20):
        stream = tokenizer.stream(() if at_start else prompt, skip_special_tokens=False)
        plain = TextStream(backend.rule, at_start=at_start)
        for token_id in rng.choices(range(tokenizer.vocab_size + 2), k=40):
            token = backend.token(token_id)
            assert stream.feed(token_id) == ("" if token is None else plain.feed(token))
        assert stream.close() == plain.close()
    assert tokenizer._known[False]


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(ValueError, match="not Unicode at character 2"):
        tokenizer.encode("ab\ud800")


def test_every_id_has_a_text_and_a_spelling(tokenizer):
    ids = range(-1, tokenizer.vocab_size + 2)
    spelled = tokenizer.token_strs(ids)
    assert spelled[0] == spelled[-1] == tokenizer.token_text(-1) == ""
    assert all(spelled[1:-2])
    for token_id in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.token_text(token_id), str)
        assert tokenizer.token_text(token_id) or tokenizer.decode([token_id]) == ""


def test_texts_of_tokens_add_up_where_no_character_is_split(tokenizer):
    ids = tokenizer.encode("Once upon a time", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).lstrip() == "Once upon a time"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_is_the_librarys(tmp_path, make, skip):
    ours = Tokenizer(make(tmp_path))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, "<s>a</s><|end|> a tool  b", "<s> x"]:
        ids = library.encode(text).ids
        assert ours.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_decoding_sentencepiece_is_the_librarys(tmp_path):
    ours = Tokenizer(sentencepiece_model(tmp_path))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        assert ours.decode(library.encode(text)) == library.decode(library.encode(text))


def test_special_tokens_are_read_in_a_text_and_skipped_on_the_way_back(tmp_path):
    tokenizer = Tokenizer(byte_level(tmp_path))
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"
    assert tokenizer.decode(tokenizer.encode("a tool")) == "a tool"  # added, but not special


@pytest.mark.parametrize(
    ("prompt", "skip", "text"),
    [("", True, "a"), ("", False, " a"), ("x", True, " a")],
    ids=["hidden prompt", "shown BOS", "shown prompt"],
)
def test_an_answer_loses_its_first_space_only_when_nothing_shows_before_it(
    tmp_path, prompt, skip, text
):
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    answer = tokenizer.encode("a", add_special_tokens=False)
    stream = tokenizer.stream(tokenizer.encode(prompt)[: 1 + 2 * len(prompt)])
    if not skip:
        stream = tokenizer.stream(tokenizer.encode(""), skip_special_tokens=False)
    assert "".join(map(stream.feed, answer)) + stream.close() == text


def test_eos_ids_are_those_of_the_files_and_of_the_named_token(tmp_path):
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 9, 100000, -1]})
    tokenizer = Tokenizer(byte_level(tmp_path))
    assert tokenizer.eos_token_ids == (0, 7, 9)


def test_chat_template_of_the_model_and_its_replacement(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    byte_fallback(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "<s>hi>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<s>hi"
    (tmp_path / "other.jinja").write_text("other")
    other = Tokenizer(tmp_path, chat_template=tmp_path / "other.jinja")
    assert other.apply_chat_template(messages) == "other"
    inline = Tokenizer(tmp_path, chat_template="{{ messages[0].content }}\\n.")
    assert inline.apply_chat_template(messages) == "hi\n."


def test_without_a_chat_template_chat_is_refused(tmp_path):
    tokenizer = Tokenizer(byte_level(tmp_path))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no tokenizer"):
        Tokenizer(tmp_path)


def test_real_gpt2_files(real_data, tmp_path):
    files = real_data / "tokenizers"
    with gzip.open(files / "gpt2_encoder.json.gz") as vocab:
        (tmp_path / "vocab.json").write_bytes(vocab.read())
    with gzip.open(files / "gpt2_vocab.bpe.gz") as merges:
        (tmp_path / "merges.txt").write_bytes(merges.read())
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("Hello world") == [15496, 995]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_real_mixtral_model(real_data, tmp_path):
    model = (real_data / "tokenizers" / "mixtral_tokenizer.model.v1").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (32000, (2,))
    assert tokenizer.encode("Hello world") == [1, 22557, 1526]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
