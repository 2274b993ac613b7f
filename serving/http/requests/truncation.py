"""truncate_prompt_tokens: a prompt keeps its last tokens, or its first."""

import dataclasses

from serving.http.errors import ApiError
from serving.http.requests.parameters import DEFAULT_COMPLETION_TOKENS
from serving.http.requests.protocol import ChatBody, ClassifyBody, GenerationBody

LEFT, RIGHT = "left", "right"  # values of truncation_side: where tokens are cut off


@dataclasses.dataclass(frozen=True)
class Truncation:
    """A bound of a prompt's tokens, at least 1, and the side that is cut off."""

    most: int
    side: str = LEFT

    def cut(self, ids: list[int], begin: list[int]) -> list[int]:
        """Return the ids, or `most` of them; special tokens `begin` at their start are kept."""
        if len(ids) <= self.most:
            return ids
        if self.side == RIGHT:
            return ids[: self.most]
        kept = begin[: self.most] if begin and ids[: len(begin)] == begin else []
        return kept + ids[len(ids) - self.most + len(kept) :]


def truncation_of(body: GenerationBody | ClassifyBody, context: int) -> Truncation | None:
    """Return the truncation that a body asks for; -1 keeps what fits beside max_tokens.

    ApiError 400 names the field for another number, and for one that leaves max_tokens no room in
    `context` tokens. A max_tokens that has none itself is refused later, by its own name.
    """
    side = LEFT if body.truncation_side is None else body.truncation_side
    if side not in (LEFT, RIGHT):
        raise ApiError(
            400, f'truncation_side must be "{LEFT}" or "{RIGHT}".', param="truncation_side"
        )
    given = body.truncate_prompt_tokens
    if given is None:
        return None
    most = context - _answer(body)
    if given == -1 or (given > 0 and most < 1):
        return Truncation(max(most, 1), side)
    if not 1 <= given <= most:
        raise ApiError(
            400,
            f"truncate_prompt_tokens must be -1 or in [1, {most}] (the model's context without "
            f"the answer's tokens), got {given}.",
            param="truncate_prompt_tokens",
        )
    return Truncation(given, side)


def _answer(body: GenerationBody | ClassifyBody) -> int:
    """Return the tokens that the answer needs at least, beside a prompt."""
    if isinstance(body, ClassifyBody):
        return 0
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is None:
        return 1 if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
    return max(asked, 0)
