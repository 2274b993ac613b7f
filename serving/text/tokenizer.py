"""Text to token ids and back, from the tokenizer files of a model folder. No jax."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_jax.adapters.added_tokens import AddedToken
from serving.text.chat_template import ChatTemplate
from serving.text.token_text import TextStream
from serving.text.tokenizer_backends import (
    AbstractBackend,
    MadeUpBackend,
    SentencePieceBackend,
    TokenizersBackend,
)
from serving.text.tokenizer_files import TokenizerFiles, inline_template

_SHORT, _MOST_KEPT = 512, 64  # characters of a text that is kept, and texts
_KEPT = 1 << 16  # tokens whose text is kept


class TokenStream:
    """The text of token ids fed one by one; ids that are not to be shown give nothing."""

    def __init__(
        self,
        backend: AbstractBackend,
        known: dict[int, str],
        *,
        at_start: bool,
        skip_special_tokens: bool,
    ):
        """`known` has the text of tokens that begin and end between two characters; it grows here.

        All streams of a backend that skip the same tokens share it.
        """
        self._backend, self._known = backend, known
        self._skip = skip_special_tokens
        self._text = TextStream(backend.rule, at_start=at_start)
        self._is_between = self._text.is_between

    def feed(self, token_id: int) -> str:
        """Return the text that is certain with this token."""
        began_between = self._is_between
        if began_between and (known := self._known.get(token_id)) is not None:
            return known
        token = shown_token(self._backend, token_id, self._skip)
        text = "" if token is None else self._text.feed(token)
        self._is_between = self._text.is_between
        if began_between and self._is_between and len(self._known) < _KEPT:
            self._known[token_id] = text
        return text

    def close(self) -> str:
        """Return what is left of an incomplete character."""
        return self._text.close()


class Tokenizer:
    """One model's tokenizer and chat template; any thread may call it.

    Reads tokenizer.json, or tokenizer.model (SentencePiece), or vocab.json with merges.txt, and
    what tokenizer_config.json, generation_config.json, config.json and chat_template.jinja add.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | Path | None = None,
        made_up: int | None = None,
        more: Sequence[AddedToken] = (),
    ):
        """`chat_template` is a Jinja file that replaces the model's own template. A folder without
        a vocabulary has one of `made_up` tokens, if that is given. `more` are added tokens beside
        those of the files, each with its id, in the order of ids.

        ValueError when a file is missing or contradicts another.
        """
        self._given = {"model": model, "chat_template": chat_template, "made_up": made_up}
        files = TokenizerFiles(Path(model), more)
        self._backend = _backend(files, made_up)
        self.vocab_size: int = self._backend.vocab_size  # one more than the largest id
        self.longest_token: int = self._backend.longest_token  # characters
        self.eos_token_ids: tuple[int, ...] = self._find_eos(files)
        self._template = _template(files, chat_template)
        self._short = functools.lru_cache(_MOST_KEPT)(self.encode)
        self._known: tuple[dict[int, str], dict[int, str]] = {}, {}  # see TokenStream; skipping

    def with_tokens(self, more: tuple[AddedToken, ...]) -> "Tokenizer":
        """Return this tokenizer with added tokens; ValueError for ids that it cannot give them."""
        return Tokenizer(**self._given, more=more)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS (and EOS) where the model wants them.

        Special tokens that are spelled out in the text become their ids. ValueError for a text
        that is not Unicode. Other threads run meanwhile, however long the text is.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"The text is not Unicode at character {error.start}.") from error
        return self._backend.encode(text, add_special_tokens)

    def encode_again(self, text: str) -> list[int]:
        """Return what `encode` returns; a short text that came lately is not encoded once more.

        For callers that may know of each other: the time says whether a text came before.
        """
        return list(self._short(text)) if len(text) <= _SHORT else self.encode(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that do not exist give nothing."""
        stream = self.stream((), skip_special_tokens=skip_special_tokens)
        return "".join([*(stream.feed(token) for token in ids), stream.close()])

    def stream(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> TokenStream:
        """Return a decoder for the tokens that follow a prompt.

        Only where nothing of the prompt is shown does the text lose the space that begins it.
        """
        shown = (shown_token(self._backend, i, skip_special_tokens) for i in prompt_ids)
        at_start = all(token is None for token in shown)
        return self._stream(at_start=at_start, skip_special_tokens=skip_special_tokens)

    def _stream(self, *, at_start: bool, skip_special_tokens: bool) -> TokenStream:
        options = {"at_start": at_start, "skip_special_tokens": skip_special_tokens}
        return TokenStream(self._backend, self._known[skip_special_tokens], **options)

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a text that it continues; half characters are U+FFFD."""
        stream = self._stream(at_start=False, skip_special_tokens=False)
        return stream.feed(token_id) + stream.close()

    def token_bytes(self, count: int) -> list[bytes]:
        """Return the bytes that each of the first `count` ids adds to a text; b"" if there is none.

        Special tokens have those of their spelling.
        """
        tokens = (self._backend.token(token_id) for token_id in range(count))
        return [b"" if token is None else self._backend.rule.later(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None for one that is not there."""
        return self._backend.token_id(token)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of tokens that are no text of their own."""
        return tuple(sorted(self._backend.special_ids))

    def token_strs(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them; "" for ids that do not exist."""
        return [self._backend.token(token_id) or "" for token_id in ids]

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the model's template makes of the messages.

        `continue_final_message` ends it with the last message's text; `variables` are what the
        template gets beside the messages. It spells out its special tokens, so encode it with
        add_special_tokens=False. ValueError without a template, or for messages that the template
        refuses.
        """
        if self._template is None:
            raise ValueError("This model has no chat template; use completions instead of chat.")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a template for messages."""
        return self._template is not None

    def _find_eos(self, files: TokenizerFiles) -> tuple[int, ...]:
        ids = set(files.eos_token_ids())
        spelled = files.special_tokens().get("eos_token")
        if spelled is not None and (eos_id := self._backend.token_id(spelled)) is not None:
            ids.add(eos_id)
        return tuple(sorted(token_id for token_id in ids if 0 <= token_id < self.vocab_size))


def check_files(
    model: str | Path, chat_template: str | Path | None = None, *, needed: bool = True
) -> None:
    """Raise ValueError for a folder without a vocabulary, if one is `needed`, and for templates.

    A vocabulary, which takes up to a second to read, is not read.
    """
    files = TokenizerFiles(Path(model))
    if needed:
        _backend_kind(files)
    _template(files, chat_template)


def _template(files: TokenizerFiles, given: str | Path | None) -> ChatTemplate | None:
    """Return the given file's chat template, else the model's, if it has one."""
    if given is None:
        source = files.chat_template()
    else:
        source = inline_template(given) or _read_template(Path(given))
    return None if source is None else ChatTemplate(source, files.special_tokens())


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"The chat template {path.absolute()} cannot be read: {error.strerror}."
        ) from None


def shown_token(backend: AbstractBackend, token_id: int, skip_special_tokens: bool) -> str | None:
    """Return the vocabulary's spelling of a token, or None for one that is not to be shown."""
    if skip_special_tokens and token_id in backend.special_ids:
        return None
    return backend.token(token_id)


def _backend(files: TokenizerFiles, made_up: int | None) -> AbstractBackend:
    try:
        return _backend_kind(files)(files)
    except _NoVocabulary:
        if made_up is None:
            raise
        return MadeUpBackend(made_up)


class _NoVocabulary(ValueError):
    """The folder has no tokenizer."""


def _backend_kind(files: TokenizerFiles) -> Callable[[TokenizerFiles], AbstractBackend]:
    if files.has("tokenizer.json") or files.has("vocab.json", "merges.txt"):
        return TokenizersBackend
    if files.has("tokenizer.model"):
        return SentencePieceBackend
    raise _NoVocabulary(
        f"{files.folder.name} has no tokenizer: neither tokenizer.json nor tokenizer.model nor "
        "vocab.json with merges.txt."
    )
