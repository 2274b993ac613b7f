"""The libraries that split text into tokens, behind one small interface. No jax."""

import abc
import json
import re
from collections.abc import Iterable
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lora_jax.adapters.added_tokens import AddedToken
from serving.text.token_text import DecodingRule, byte_fallback, decoding_rule
from serving.text.tokenizer_files import TokenizerFiles

# A private-use character: no piece contains it, so that nothing merges across it.
_BORDER = "\ue000"
_WINDOW = 1 << 14  # characters


class AbstractBackend(abc.ABC):
    """A vocabulary with its rules for encoding and decoding."""

    rule: DecodingRule
    special_ids: frozenset[int]
    vocab_size: int  # one more than the largest id
    longest_token: int  # characters of a text that one token may stand for

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, without holding the interpreter lock for long."""

    @abc.abstractmethod
    def token(self, token_id: int) -> str | None:
        """Return the spelling of a token as `rule` wants it, None for an id that does not exist."""

    @abc.abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token, None for one that does not exist."""


class TokenizersBackend(AbstractBackend):
    """tokenizer.json, or GPT-2's vocab.json and merges.txt."""

    def __init__(self, files: TokenizerFiles):
        if files.has("tokenizer.json"):
            self._tokenizer = _from_file(files)
        else:
            self._tokenizer = _byte_level_bpe(files)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_tokens(files)
        self.rule = decoding_rule(json.loads(self._tokenizer.to_str())["decoder"])
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size, self.longest_token = 1 + max(vocab.values()), max(map(len, vocab))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike `encode` it releases the interpreter lock; `fast` leaves out what is not asked for.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if token_id >= 0 else None

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _add_tokens(self, files: TokenizerFiles) -> None:
        """Add what the other files name and tokenizer.json lacks; ids must come out as said."""
        added = {t.content for t in self._tokenizer.get_added_tokens_decoder().values()}
        for token in files.added_tokens():
            if token.content not in added:
                self._tokenizer.add_tokens([_as_library_token(token)])
            actual = self._tokenizer.token_to_id(token.content)
            if token.token_id is not None and actual != token.token_id:
                raise ValueError(
                    f"{files.folder.name}: the token {token.content!r} is to have the id "
                    f"{token.token_id} but gets {actual}."
                )


class SentencePieceBackend(AbstractBackend):
    """tokenizer.model: a SentencePiece model, with the special tokens that other files add."""

    def __init__(self, files: TokenizerFiles):
        path = files.path("tokenizer.model")
        self._model: Any = sentencepiece.SentencePieceProcessor(model_file=path)
        prefixed = self._model.encode("a", out_type=str)[0].startswith("▁")
        self._legacy = bool(files.config.get("legacy", False))
        added = files.added_tokens()
        self._added = {token.content: self._place(files, token) for token in added}
        self._extra = {i: content for content, i in self._added.items()}
        base = self._model.get_piece_size()
        controls = {i for i in range(base) if self._model.is_control(i)}
        special = {self._added[token.content] for token in added if token.special}
        self.special_ids = frozenset(controls | special)
        self.vocab_size = max(base, 1 + max(self._extra, default=-1))
        pieces = (self._model.id_to_piece(i) for i in range(base))
        self.longest_token = max(map(len, (*pieces, *self._added)))
        self._splitter = _Splitter(self._added)
        self._bos = self._model.bos_id() if files.config.get("add_bos_token", True) else -1
        self._eos = self._model.eos_id() if files.config.get("add_eos_token", False) else -1
        self.rule = DecodingRule(_piece_bytes, _piece_bytes, strip=int(prefixed))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = [self._bos] if add_special_tokens and self._bos >= 0 else []
        continued = False
        for part in self._splitter.split(text):
            if part in self._added:
                ids.append(self._added[part])
                continued = True
            elif part:
                ids += self._continue(part) if continued else self._model.encode(part)
        return [*ids, self._eos] if add_special_tokens and self._eos >= 0 else ids

    def token(self, token_id: int) -> str | None:
        if token_id in self._extra:
            return self._extra[token_id]
        if not 0 <= token_id < self._model.get_piece_size():
            return None
        return self._model.id_to_piece(token_id)

    def token_id(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        token_id = self._model.piece_to_id(token)
        return token_id if self._model.id_to_piece(token_id) == token else None

    def _continue(self, text: str) -> list[int]:
        """Encode what stands after a special token: without a space in front of it.

        The config's "legacy" models were trained with one there all the same.
        """
        if self._legacy:
            return self._model.encode(text)
        return self._model.encode(_BORDER + text)[len(self._model.encode(_BORDER)) :]

    def _place(self, files: TokenizerFiles, token: AddedToken) -> int:
        """Return the id of an added token: the one that is said, or that of an equal piece."""
        if token.token_id is not None:
            return token.token_id
        token_id = self._model.piece_to_id(token.content)
        if self._model.id_to_piece(token_id) != token.content:
            raise ValueError(f"{files.folder.name}: no file says the id of {token.content!r}.")
        return token_id


class MadeUpBackend(AbstractBackend):
    """A vocabulary for random weights: a byte is a token, further ids are spelled as numbers."""

    def __init__(self, vocab_size: int):
        self.vocab_size, self.special_ids, self.longest_token = vocab_size, frozenset(), 1
        self.rule = DecodingRule(byte_fallback, byte_fallback)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return f"<0x{token_id:02X}>" if token_id < 256 else f" {token_id}"

    def token_id(self, token: str) -> int | None:
        return None


def _from_file(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(files.path("tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"{files.folder.name}/tokenizer.json cannot be read: {str(error)[:200]}"
        ) from error


def _byte_level_bpe(files: TokenizerFiles) -> tokenizers.Tokenizer:
    model = models.BPE.from_file(files.path("vocab.json"), files.path("merges.txt"))
    tokenizer = tokenizers.Tokenizer(model)
    space = bool(files.config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _as_library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


class _Splitter:
    """Splits texts at added tokens, the longest first, a window of the text at a time.

    One search in a long text would hold the interpreter lock throughout.
    """

    def __init__(self, added: Iterable[str]):
        longest_first = sorted(added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._longest = len(longest_first[0]) if longest_first else 0

    def split(self, text: str) -> list[str]:
        """Return added tokens and what stands between them, in order."""
        parts, begin, position = [], 0, 0
        while self._longest and position < len(text):
            window = position + _WINDOW
            match = self._pattern.search(text, position, window + self._longest - 1)
            if match is None or match.start() >= window:
                position = window
                continue
            parts += [text[begin : match.start()], match[0]]
            begin = position = match.end()
        return [*parts, text[begin:]]


def _piece_bytes(piece: str) -> bytes:
    return byte_fallback(piece.replace("▁", " "))
