"""Bodies of requests. Every field may be null; types are strict; unknown fields are ignored.

Numbers are bounded by `Sampling`, which knows what the engine can do. A field that would change
the answer but is not implemented is refused by name (see `unsupported`).
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.json_schema import JsonSchemaMode, models_json_schema

MAX_PROMPTS = 1024
CacheSalt = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")
]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    """Usage options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields of completions and chat completions alike."""

    model: str | None = None
    lora_path: str | None = None  # SGLang's way to name an adapter
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # wins over max_tokens
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: CacheSalt | None = None
    best_of: int | None = None
    # Accepted without effect.
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: str | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        return self


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ContentPart(Body):
    """One part of a message: only text is understood."""

    type: str | None = None
    text: str | None = None


class ChatMessage(Body):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None


class TokenizeBody(Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter (vLLM) and /load_lora_adapter (SGLang)."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadAdapterBody(Body):
    """Body of the routes that unload an adapter."""

    lora_name: str


class AdapterSource(Body):
    """Location of an adapter in Dynamo's form."""

    uri: str


class DynamoLoadBody(Body):
    """Body of POST /v1/loras (Dynamo)."""

    lora_name: str
    source: AdapterSource


BODIES: tuple[type[Body], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
BODIES += (LoadAdapterBody, UnloadAdapterBody, DynamoLoadBody)


def body_schemas() -> dict[str, Any]:
    """Return the JSON schemas of all bodies and their parts by name, as OpenAPI refers to them."""
    template = "#/components/schemas/{model}"
    mode: JsonSchemaMode = "validation"
    _, schemas = models_json_schema([(b, mode) for b in BODIES], ref_template=template)
    return schemas["$defs"]


# Fields that would change the answer, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "kv_transfer_params": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "audio": (),
}


def unsupported(body: Body) -> str | None:
    """Return the name of a field that asks for what this server does not do, or None."""
    for name, harmless in _REFUSED.items():
        value = getattr(body, name, None)
        if value is not None and not any(type(h) is type(value) and h == value for h in harmless):
            return name
    return None
