"""Results of a step: the token that a sequence got, and whether it ends with it. No jax."""

from collections.abc import Container

from serving.api.request import FinishReason, Progress, Sequence, SequenceResult


def ending(
    sequence: Sequence, token: int, eos: Container[int]
) -> tuple[FinishReason | None, int | None]:
    """Return why the sequence ends with this token, if it does, and at which stop token.

    Where a grammar binds the output, an end token comes only where its mask allows it.
    """
    request = sequence.request
    sampling = request.sampling
    if sampling.structured_outputs is not None and token in eos:
        return FinishReason.STOP, None
    num_outputs = len(sequence.token_ids) - len(request.prompt_ids)
    if num_outputs >= sampling.min_tokens:
        if token in eos and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
    if num_outputs >= sequence.max_outputs:
        return FinishReason.LENGTH, None
    return None, None


def take_in(result: SequenceResult, now: float, eos: Container[int]) -> Progress:
    """Give a sequence its token, if the chunk drew one; returns its progress, and why it ends.

    Raises ValueError where a chunk that draws a token has none.
    """
    chunk, token = result.chunk, result.token_id
    sequence = chunk.sequence
    if not chunk.samples:
        is_read = chunk.start + chunk.num_tokens == sequence.num_prompt
        ends = is_read and not sequence.max_outputs
        why = FinishReason.LENGTH if sequence.request.head is None else FinishReason.STOP
        return Progress(sequence, result, why if ends else None)
    if token is None:
        raise ValueError(f"No token came back for {sequence.request.request_id}.")
    sequence.token_ids.append(token)
    if sequence.first_token_s is None:
        sequence.first_token_s = now
    why, stop = ending(sequence, token, eos)
    # Without the constructor, which takes as long as the rest, and is called for each token.
    return tuple.__new__(Progress, (sequence, result, why, stop))
