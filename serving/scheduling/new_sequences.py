"""The sequences of a request that is queued. No jax."""

from serving.api.request import Request, Sequence
from serving.api.sampling import fold_seed
from serving.scheduling.step_budget import SchedulerLimits


def new_sequences(
    request: Request, limits: SchedulerLimits, *, seed: int, number: int
) -> list[Sequence]:
    """Return the n choices of a request; `number` is the first one's place in order of arrival."""
    length = len(request.prompt_ids)
    most = min(request.sampling.max_tokens, limits.max_model_len - length)
    job = length + most if limits.scheduling_policy == "sjf" else 0
    return [
        Sequence(
            request=request,
            index=index,
            seed=fold_seed(seed, index),
            token_ids=list(request.prompt_ids),
            number=number + index,
            max_outputs=most,
            job_tokens=job,
        )
        for index in range(request.sampling.n)
    ]
