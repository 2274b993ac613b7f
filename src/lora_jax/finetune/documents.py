"""Records as tokens: in the turns of a model's own chat template, or as one running text."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from lora_jax.finetune.records import Record


@dataclasses.dataclass(frozen=True)
class Document:
    """One text a model learns or is measured on; the first `num_prompt` tokens are the prompt."""

    tokens: tuple[int, ...]
    num_prompt: int


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """Record format of a model folder: tokenizer, special strings and chat template."""

    tokenizer: Tokenizer
    template: Template | None
    bos: str
    eos: str

    def chat(self, record: Record) -> Document:
        """Return prompt and answer as a user's and an assistant's turn.

        Raises ValueError when the model has no chat template, or one that rewrites old turns.
        """
        return self.exchange(record.prompt, record.answer)

    def exchange(self, content: str | list[dict[str, str]], answer: str) -> Document:
        """Return a user's turn, a text or parts with images, and the assistant's; as `chat`."""
        if self.template is None:
            raise ValueError("this model has no chat template: use plain text")
        question = [{"role": "user", "content": content}]
        answered = [*question, {"role": "assistant", "content": answer}]
        specials = {"bos_token": self.bos, "eos_token": self.eos}
        start = self.template.render(messages=question, add_generation_prompt=True, **specials)
        whole = self.template.render(messages=answered, add_generation_prompt=False, **specials)
        if not whole.startswith(start):
            raise ValueError("the chat template does not begin an answered chat as an asked one")
        return self._document(start, whole[len(start) :], add_special_tokens=False)

    def prompt(self, text: str, style: str) -> tuple[int, ...]:
        """Return the tokens of a user's message alone, as a server has them before it answers.

        `style` is "chat" or "plain". Raises ValueError as `chat` does.
        """
        if style == "plain":
            return tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)
        if self.template is None:
            raise ValueError("this model has no chat template: use plain text")
        question = [{"role": "user", "content": text}]
        specials = {"bos_token": self.bos, "eos_token": self.eos}
        whole = self.template.render(messages=question, add_generation_prompt=True, **specials)
        return tuple(self.tokenizer.encode(whole, add_special_tokens=False).ids)

    def plain(self, record: Record) -> Document:
        """Return prompt, a space, answer and end of text as one running text."""
        return self._document(record.prompt, f" {record.answer}", add_special_tokens=True)

    def _document(self, prompt: str, answer: str, *, add_special_tokens: bool) -> Document:
        """Tokenise prompt and answer together, so that tokens are those a server would make."""
        encoding = self.tokenizer.encode(prompt + answer, add_special_tokens=add_special_tokens)
        tokens = list(encoding.ids)
        ends = [end for _, end in encoding.offsets]
        num_prompt = sum(end <= len(prompt) for end in ends)
        end_token = self.tokenizer.token_to_id(self.eos)
        if add_special_tokens and end_token is not None:
            tokens.append(end_token)
        return Document(tuple(tokens), num_prompt)

    def until(self, document: Document, pattern: re.Pattern[str]) -> Document:
        """Return a document up to the first of its answer's tokens with which a pattern is found.

        Raises ValueError when the answer does not hold the pattern.
        """
        answer = ""
        for end in range(document.num_prompt + 1, len(document.tokens) + 1):
            answer = self.tokenizer.decode(list(document.tokens[document.num_prompt : end]))
            if pattern.search(answer):
                return dataclasses.replace(document, tokens=document.tokens[:end])
        raise ValueError(f"no {pattern.pattern} in {answer!r}")

    def documents(self, records: Iterable[Record], style: str) -> list[Document]:
        """Return one document per record; `style` is "chat" or "plain"."""
        if style not in ("chat", "plain"):
            raise ValueError(f"style {style!r} is not one of chat, plain")
        return [self.chat(r) if style == "chat" else self.plain(r) for r in records]


def read_format(folder: pathlib.Path) -> TextFormat:
    """Return the text format of a model folder (tokenizer.json, tokenizer_config.json)."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    source = config.get("chat_template")
    template = None
    if source is not None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(source)
    return TextFormat(
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        template=template,
        bos=special_string(config.get("bos_token")),
        eos=special_string(config.get("eos_token")),
    )


def special_string(value: str | dict | None) -> str:
    """Return the text of a special token, which configs write as a string or as an object."""
    if isinstance(value, dict):
        return value["content"]
    return value or ""
