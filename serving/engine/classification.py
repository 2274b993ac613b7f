"""Answers of task heads for callers of `Engine.classify`, and who may ask one. No jax."""

import dataclasses

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.task_head import HeadAnswer, TaskHead
from serving.api.outputs import RequestOutput
from serving.api.sampling import Sampling

# Nothing is sampled; echo is what says that this is meant.
HEAD_SAMPLING = Sampling(max_tokens=0, echo=True, temperature=0.0, detokenize=False)


@dataclasses.dataclass(frozen=True)
class Classification:
    """The answer of a task head to one prompt."""

    request_id: str
    prompt_ids: tuple[int, ...]
    adapter: str
    outputs: HeadAnswer  # vLLM's name: outputs.probs
    num_cached_tokens: int = 0
    prompt: str | None = None  # its text, where it came as text
    adapter_version: str | None = None  # that served it, where the adapter has versions

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """vLLM's name of `prompt_ids`."""
        return self.prompt_ids

    @property
    def label(self) -> str:
        """The most likely label."""
        return self.outputs.label

    @property
    def probs(self) -> tuple[float, ...]:
        """The probability of each label."""
        return self.outputs.probs


def asked_head(name: str | None, entry: AdapterEntry | None, sampling: Sampling) -> TaskHead:
    """Return the head of an adapter that is asked for it; ValueError for one that has none."""
    if entry is None:
        raise ValueError("The base model has no task head: name an adapter that has one.")
    if entry.report.head is None:
        raise ValueError(f"The adapter {name!r} has no task head; ask it for text.")
    if sampling is not HEAD_SAMPLING and sampling != HEAD_SAMPLING:
        raise ValueError("A task head samples nothing: its sampling must be HEAD_SAMPLING.")
    return entry.report.head


def classified(output: RequestOutput) -> Classification:
    """Return the output of a request that a head has answered."""
    (choice,) = output.outputs
    assert choice.head is not None, "every such request ends with the head's answer"
    assert output.adapter is not None, "the base model has no head"
    return Classification(
        request_id=output.request_id,
        prompt_ids=output.prompt_ids,
        adapter=output.adapter,
        outputs=choice.head,
        num_cached_tokens=output.num_cached_tokens,
        prompt=output.prompt,
        adapter_version=output.adapter_version,
    )
