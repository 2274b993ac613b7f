"""Chat-template options of a request, beside the messages."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from serving.http.errors import ApiError
from serving.http.requests.protocol import ChatBody, TemplateFields
from serving.http.requests.tools import template_tools
from serving.text.chat_template import OWN_VARIABLES


@dataclasses.dataclass(frozen=True)
class TemplateOptions:
    """Options that turn the messages into a prompt."""

    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]

    def as_arguments(self) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template`; what asks for nothing is left out."""
        more: dict[str, Any] = {"add_generation_prompt": self.add_generation_prompt}
        if self.continue_final_message:
            more["continue_final_message"] = True
        if self.variables:
            more["variables"] = dict(self.variables)
        return more


def template_options(body: TemplateFields, defaults: Mapping[str, Any]) -> TemplateOptions:
    """Return what the body asks for over the server's defaults; ApiError 400 for contradictions."""
    given = body.chat_template_kwargs or {}
    taken = next((name for name in given if name in OWN_VARIABLES or not name.isidentifier()), None)
    if taken is not None:
        raise ApiError(
            400,
            f"chat_template_kwargs must not have {taken[:64]!r}: the server fills it in.",
            param="chat_template_kwargs",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be true.",
            param="continue_final_message",
        )
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    variables = {**defaults, **_of_effort(body, given), **given}
    if isinstance(body, ChatBody):
        variables |= template_tools(body)
        variables |= {"documents": body.documents} if body.documents else {}
    return TemplateOptions(adds, continues, variables)


def _of_effort(body: TemplateFields, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables for reasoning_effort, as vLLM sets them."""
    effort = getattr(body, "reasoning_effort", None)
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
