"""Bodies of requests. Every field may be null; types are strict; unknown fields are ignored.

Numbers are bounded by `Sampling`, which knows what the engine can do. A field that would change
the answer but is not implemented is refused by name (see `refused_fields`).
"""

from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import PydanticCustomError

from serving.api.sampling import MAX_LOGIT_BIAS

MAX_PROMPTS = 1024
_MAX_SALT = 128  # characters
_OUT_OF_SALTS = frozenset("@/\\\0")
_MAX_NAME = 4096  # characters; a path may be so long
Name = Annotated[str, StringConstraints(max_length=_MAX_NAME)]
# A list whose check ends at the first wrong entry: pydantic makes an error for each otherwise.
T = TypeVar("T")
Quick = Annotated[list[T], Field(fail_fast=True)]


def _few(value: Any) -> Any:
    """Refuse a large object before its entries are looked at: each may be an error."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "too_long",
            "must have at most {most} entries, got {given}",
            {"most": MAX_LOGIT_BIAS, "given": len(value)},
        )
    return value


def _one_name(value: Any) -> Any:
    """Refuse SGLang's list of adapters, one for each prompt, with what to do."""
    if isinstance(value, list):
        raise PydanticCustomError(
            "one_name", "must be one name, not a list: send a request for each adapter"
        )
    return value


def _checked_salt(value: str) -> str:
    if not 1 <= len(value) <= _MAX_SALT or not _OUT_OF_SALTS.isdisjoint(value):
        raise PydanticCustomError(
            "salt",
            "must have 1 to {most} characters, none of them @, /, \\ or NUL; base64 for URLs fits",
            {"most": _MAX_SALT},
        )
    return value


Biases = Annotated[dict[str, float], BeforeValidator(_few)]
CacheSalt = Annotated[str, AfterValidator(_checked_salt)]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    """Usage options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields of completions and chat completions alike."""

    model: str | None = Field(default=None, max_length=_MAX_NAME)
    # SGLang's way to name an adapter.
    lora_path: Annotated[str | None, BeforeValidator(_one_name)] = Field(
        default=None, max_length=_MAX_NAME
    )
    # Weighted sums of adapters: objects with name and weight; see adapters.composition.parts_of.
    adapters: Annotated[list[Any], Field(max_length=64)] | None = None
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
    stop: str | Quick[str] | None = None
    stop_token_ids: Quick[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Quick[int] | None = None
    bad_words: Quick[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = Field(default=None, max_length=32)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    head: Annotated[str, StringConstraints(max_length=32)] | None = None  # see requests.heads
    best_of: int | None = None
    priority: int | None = None
    # What the answer's id ends with, in place of the header X-Request-Id.
    request_id: str | None = Field(default=None, max_length=_MAX_NAME)
    # Who asks, for a rollout of versions.
    user: str | None = Field(default=None, max_length=_MAX_NAME)
    prompt_cache_key: str | None = Field(default=None, max_length=_MAX_NAME)
    safety_identifier: str | None = Field(default=None, max_length=_MAX_NAME)


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: str | Quick[str] | Quick[int] | Quick[Quick[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ImageUrl(Body):
    """URL of an image; `detail` has no effect."""

    url: str
    detail: str | None = None


class ContentPart(Body):
    """One part of a message: text, or an image by its URL."""

    type: str | None = Field(default=None, max_length=_MAX_NAME)
    text: str | None = None
    image_url: ImageUrl | str | None = None


class ChatMessage(Body):
    """One message of a chat."""

    role: Name
    content: str | Quick[ContentPart] | None = None


class TemplateFields(Body):
    """Chat-template options beside the messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class ChatBody(GenerationBody, TemplateFields):
    """Body of POST /v1/chat/completions."""

    messages: Quick[ChatMessage]
    echo: bool | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    include_reasoning: bool | None = None  # false: the answer has no thoughts
    documents: Quick[dict[str, Any]] | None = None  # what the template shows of them
    tools: Quick[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ClassifyBody(TemplateFields):
    """Body of POST /classify: inputs, or messages."""

    model: str | None = Field(default=None, max_length=_MAX_NAME)
    # SGLang's way to name an adapter.
    lora_path: Annotated[str | None, BeforeValidator(_one_name)] = Field(
        default=None, max_length=_MAX_NAME
    )
    adapters: Annotated[list[Any], Field(max_length=64)] | None = None
    input: str | Quick[str] | Quick[int] | Quick[Quick[int]] | None = None
    messages: Quick[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = Field(default=None, max_length=32)
    use_activation: bool | None = None  # false: logits in place of probabilities
    head: Annotated[str, StringConstraints(max_length=32)] | None = None  # see requests.heads
    cache_salt: CacheSalt | None = None
    priority: int | None = None
    user: str | None = Field(default=None, max_length=_MAX_NAME)
    prompt_cache_key: str | None = Field(default=None, max_length=_MAX_NAME)
    safety_identifier: str | None = Field(default=None, max_length=_MAX_NAME)


class ReasoningOptions(Body):
    """Options of a response's thoughts."""

    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    summary: Annotated[str, StringConstraints(max_length=32)] | None = None


class TextOptions(Body):
    """Options of a response's text."""

    format: dict[str, Any] | None = None
    verbosity: Annotated[str, StringConstraints(max_length=32)] | None = None


class ResponsesBody(Body):
    """Body of POST /v1/responses. Sampling fields of chats that are not named here work too."""

    model: str | None = Field(default=None, max_length=_MAX_NAME)
    input: str | Quick[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Quick[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Annotated[str, StringConstraints(max_length=32)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class TokenizeBody(TemplateFields):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = Field(default=None, max_length=_MAX_NAME)
    prompt: str | None = None
    messages: Quick[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(default=None, max_length=_MAX_NAME)
    tokens: Quick[int]


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter (vLLM) and /load_lora_adapter (SGLang)."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadAdapterBody(Body):
    """Body of the routes that unload an adapter."""

    lora_name: Name


class AdapterSource(Body):
    """Location of an adapter in Dynamo's form."""

    uri: Name


class DynamoLoadBody(Body):
    """Body of POST /v1/loras (Dynamo)."""

    lora_name: Name
    source: AdapterSource


class RolloutBody(Body):
    """Body of PUT /v1/adapters/{name}/rollout: percent by version, and limits for the newest.

    Without `guard` the limits stay; null takes them away.
    """

    versions: Annotated[dict[str, Any], Field(max_length=64)]
    guard: Annotated[dict[str, Any], Field(max_length=64)] | None = None


BODIES: tuple[type[Body], ...] = (
    CompletionBody,
    ChatBody,
    ClassifyBody,
    ResponsesBody,
    TokenizeBody,
    DetokenizeBody,
)
NAMES_ONLY: tuple[type[Body], ...] = (
    LoadAdapterBody,
    UnloadAdapterBody,
    DynamoLoadBody,
    RolloutBody,
)
BODIES += NAMES_ONLY


def body_schemas() -> dict[str, Any]:
    """Return the JSON schemas of all bodies and their parts by name, as OpenAPI refers to them."""
    template = "#/components/schemas/{model}"
    mode: JsonSchemaMode = "validation"
    _, schemas = models_json_schema([(b, mode) for b in BODIES], ref_template=template)
    return schemas["$defs"]
