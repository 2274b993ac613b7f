"""Task heads in requests for text: whether one answers, and what cannot be asked of it."""

from typing import Any

from serving.http.errors import ApiError
from serving.http.requests.model_names import Target
from serving.http.requests.protocol import ChatBody, ClassifyBody, GenerationBody

TASK, LM = "task", "lm"  # values of `head`
# Fields that ask for generated text, and the values that ask for nothing.
_GENERATED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "tools": ([],),
    "response_format": (),
    "structured_outputs": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
}
_NO_CALLS = ("none", "auto")
_PLAIN = {"type": "text"}


def by_head(body: GenerationBody, target: Target) -> bool:
    """Return whether the adapter's task head answers a request for text.

    It does where there is one, unless `head` is "lm". ApiError 400 naming the field for another
    `head`, for a head that is not there, and for what only generated text can have.
    """
    if body.head not in (None, TASK, LM):
        raise ApiError(400, f'head must be "{TASK}" or "{LM}".', param="head")
    has_head = target.entry is not None and target.entry.report.head is not None
    if body.head == TASK and not has_head:
        raise no_head(target, "head")
    if not has_head or body.head == LM:
        return False
    field = _generated(body)
    if field is not None:
        raise ApiError(
            400,
            f"{field} goes with generated text, and the task head of `{target.name}` answers "
            f'here: leave it out, or send "head": "{LM}" to have text.',
            param=field,
        )
    return True


def with_length[B: GenerationBody](body: B, asks_head: bool) -> B:
    """Return the body to check sampling by: a head writes no token, so 0 of them may be asked."""
    if not asks_head:
        return body
    zero = [name for name in ("max_tokens", "max_completion_tokens") if getattr(body, name) == 0]
    return body.model_copy(update=dict.fromkeys(zero, 1)) if zero else body


def check_classify(body: ClassifyBody, target: Target) -> None:
    """Raise ApiError 400 for a target without a task head, for another head than that, and for
    input that is not one of two.
    """
    if body.head not in (None, TASK):
        raise ApiError(
            400,
            f'/classify is answered by the task head: leave head out, or send "head": "{LM}" to '
            "/v1/chat/completions to have text.",
            param="head",
        )
    if (body.input is None) == (body.messages is None):
        raise ApiError(400, "Give either input or messages.", param="input")
    if target.entry is None or target.entry.report.head is None:
        raise no_head(target, "model")


def no_head(target: Target, param: str) -> ApiError:
    """Return the answer to a request for a head that is not there."""
    return ApiError(
        400,
        f"The model `{target.name}` has no task head; /v1/models shows which adapters have one.",
        param=param,
    )


def _generated(body: GenerationBody) -> str | None:
    """Return the first field that asks for generated text, if there is one."""
    if isinstance(body, ChatBody) and body.tool_choice not in (None, *_NO_CALLS):
        return "tool_choice"
    for name, harmless in _GENERATED.items():
        value = getattr(body, name, None)
        if name == "response_format" and value == _PLAIN:
            continue
        if value is not None and not any(type(h) is type(value) and h == value for h in harmless):
            return name
    return None
