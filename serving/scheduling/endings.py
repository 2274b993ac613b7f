"""Ends of sequences with the token that they just got. No jax."""

from collections.abc import Container

from serving.api.request import FinishReason, Sequence


def ending(
    sequence: Sequence, token: int, eos: Container[int]
) -> tuple[FinishReason | None, int | None]:
    """Return why the sequence ends with this token, if it does, and at which stop token.

    Where a grammar binds the output, an end token comes only where its mask allows it.
    """
    sampling = sequence.request.sampling
    if sampling.structured_outputs is not None and token in eos:
        return FinishReason.STOP, None
    num_outputs = len(sequence.token_ids) - sequence.num_prompt
    if num_outputs >= sampling.min_tokens:
        if token in eos and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
    if num_outputs >= sequence.max_outputs:
        return FinishReason.LENGTH, None
    return None, None
