import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from serving.text.token_text import TextStream, byte_alphabet, byte_level, decoding_rule

LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
LIBRARY = {
    "llama": (
        LLAMA,
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    ),
    "metaspace": (METASPACE, decoders.Metaspace(prepend_scheme="first")),
    "metaspace, never": (
        {**METASPACE, "prepend_scheme": "never"},
        decoders.Metaspace(prepend_scheme="never"),
    ),
    "byte level": ({"type": "ByteLevel"}, decoders.ByteLevel()),
}


def text_of(decoder: dict | None, tokens: list[str], *, at_start: bool = True) -> str:
    stream = TextStream(decoding_rule(decoder), at_start=at_start)
    return "".join([*map(stream.feed, tokens), stream.close()])


def test_the_alphabet_is_the_librarys():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("kind", LIBRARY)
@given(tokens=st.lists(st.text("ab▁Ġ é<>", max_size=4), max_size=6))
def test_text_is_what_the_library_makes_of_all_tokens_at_once(kind, tokens):
    decoder, library = LIBRARY[kind]
    assert text_of(decoder, tokens) == library.decode(tokens)


@given(st.binary(max_size=12))
def test_any_bytes_give_the_librarys_text(data):
    byte_to_char = {byte: char for char, byte in byte_alphabet().items()}
    tokens = [byte_to_char[byte] for byte in data]
    assert text_of({"type": "ByteLevel"}, tokens) == decoders.ByteLevel().decode(tokens)


@given(st.text(max_size=8))
def test_bytes_of_a_text_give_the_text_and_no_broken_character_on_the_way(text):
    stream = TextStream(decoding_rule(LLAMA), at_start=False)
    pieces = [stream.feed(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(pieces) == text
    assert stream.close() == ""


def test_a_character_that_never_became_whole_is_replaced_at_the_end():
    stream = TextStream(decoding_rule(LLAMA))
    assert [stream.feed(t) for t in ("▁a", "<0xE2>", "<0x82>")] == ["a", "", ""]
    assert stream.close() == "�"


def test_broken_bytes_do_not_harm_whole_characters_beside_them():
    assert text_of(LLAMA, ["<0xC3>", "<0xA9>", "<0xFF>", "x"]) == "é�x"


@pytest.mark.parametrize(
    ("at_start", "text"), [(True, "a b"), (False, " a b")], ids=["begins", "goes on"]
)
def test_only_the_beginning_of_a_text_loses_its_space(at_start, text):
    assert text_of(LLAMA, ["▁a", "▁b"], at_start=at_start) == text
    assert text_of(METASPACE, ["▁a", "▁b"], at_start=at_start) == text
    assert text_of(None, ["a", "b"], at_start=at_start) == text


def test_plain_text_in_a_byte_level_vocabulary_stands_for_itself():
    assert byte_level("a tool") == b"a tool"
    assert byte_level("Ġa") == b" a"


@pytest.mark.parametrize(
    "step",
    [
        {"type": "WordPiece", "prefix": "##"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},  # not after Fuse
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
    ],
)
def test_unknown_steps_are_refused(step):
    with pytest.raises(ValueError, match="not supported"):
        decoding_rule({"type": "Sequence", "decoders": [step]})


def test_the_older_spelling_of_metaspace():
    old = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": False}
    assert text_of(old, ["▁a"]) == " a"


def test_a_token_in_plain_text_stands_for_itself():
    """Any character that stands for no byte makes it one, of Latin-1 too."""
    alphabet = byte_alphabet()
    for code in (*range(0x180), 0xFFFF, 0x1F600):
        char = chr(code)
        own = bytes([alphabet[char]]) if char in alphabet else char.encode()
        assert byte_level(char) == own
        assert byte_level(f"a{char}") == (b"a" + own)
    assert byte_level("Ġ \ud800") == "Ġ ?".encode()
