"""Callers who ask an engine for adapters by Zipf, each again as soon as it has been answered.

So many requests are open all the time: no figure has a beginning or an end in which rows are idle.
"""

import itertools
import queue
import random
import statistics
import time
from typing import Any, Protocol

from serving import Engine, Sampling
from serving.api.request import OutputDelta

_PATIENCE_S = 120.0  # for one more answer


class Asking(Protocol):
    """Sizes of a crowd: callers, answers of a round, tokens in and out, and the adapters' shares.

    `on_host` adapters are asked for once by `Crowd.fill`; `base_share` of the requests name none.
    """

    @property
    def callers(self) -> int: ...

    @property
    def requests(self) -> int: ...

    @property
    def prompt(self) -> int: ...

    @property
    def answer(self) -> int: ...

    @property
    def on_host(self) -> int: ...

    @property
    def zipf(self) -> float: ...

    @property
    def base_share(self) -> float: ...


class Answer:
    """Receiver of one request's outputs, which the engine calls."""

    def __init__(self, asked: str | None, ended: queue.SimpleQueue):
        self.asked, self.num_tokens, self.error = asked, 0, None
        self.first_s = self.last_s = 0.0
        self._ended = ended

    def __call__(self, delta: OutputDelta) -> None:
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.error = delta.error
            self._ended.put(self)

    @property
    def between_tokens(self) -> float:
        """Mean seconds from one token to the next."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


class Crowd:
    """Callers who ask one engine, each again when it has been answered."""

    def __init__(self, engine: Engine, names: list[str], case: Asking, rng: random.Random):
        self._engine, self._names, self._case, self._rng = engine, names, case, rng
        self._weights = list(itertools.accumulate((n + 1) ** -case.zipf for n in range(len(names))))
        self._ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._open: set[Answer] = set()
        self._most = engine.model_info.vocab_size - 1

    def fill(self) -> None:
        """Ask each adapter that the host has room for once, the most popular ones last."""
        for name in reversed(self._names[: self._case.on_host]):
            self._ask(name, 1)
        while self._open:
            self._answer()

    def begin(self) -> None:
        """Let all callers ask, and wait until the first of them have been answered.

        Their first answers have lengths at random. Of equal ones all rows begin and end together,
        again and again where no request waits for an adapter: one step of many then has all
        prompts, and most others none, which a crowd that waits for adapters has not.
        """
        for _ in range(self._case.callers):
            self._ask_any(1 + self._rng.randrange(self._case.answer))
        for _ in range(self._case.callers):
            self._answer()
            self._ask_any()

    def round(self) -> dict[str, Any]:
        """Return tokens per second and base rows' time per token, over so many answers."""
        begun, tokens, base = time.perf_counter(), -self._tokens(), []
        for _ in range(self._case.requests):
            answer = self._answer()
            tokens += answer.num_tokens
            if answer.asked is None:
                base.append(answer.between_tokens)
            self._ask_any()
        tokens += self._tokens()
        return {
            "tokens_per_s": tokens / (time.perf_counter() - begun),
            "base_tpot_ms": 1e3 * statistics.median(base) if base else 0.0,
        }

    def end(self) -> None:
        """Wait for the answers that are under way."""
        while self._open:
            self._answer()

    def _tokens(self) -> int:
        """Return how many tokens the open requests have got."""
        return sum(answer.num_tokens for answer in self._open)

    def _ask_any(self, num_tokens: int | None = None) -> None:
        name = next_asked(self._names, self._weights, self._case, self._rng)
        self._ask(name, num_tokens or self._case.answer)

    def _ask(self, name: str | None, num_tokens: int) -> None:
        answer = Answer(name, self._ended)
        self._open.add(answer)
        prompt = [self._rng.randrange(3, self._most) for _ in range(self._case.prompt)]
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(prompt, name, sampling, on_output=answer)

    def _answer(self) -> Answer:
        answer = self._ended.get(timeout=_PATIENCE_S)
        self._open.remove(answer)
        if answer.error is not None:
            raise RuntimeError(f"A request of {answer.asked or 'the base'} failed: {answer.error}")
        return answer


def next_asked(
    names: list[str], weights: list[float], case: Asking, rng: random.Random
) -> str | None:
    """Return the adapter of one request, by cumulative weights; None: the base model."""
    if rng.random() < case.base_share:
        return None
    return rng.choices(names, cum_weights=weights)[0]


def tier_hits(engine: Engine) -> dict[str, float]:
    """Return where requests have found their adapters so far."""
    sample = engine.metrics.registry.get_sample_value
    name = "lora_jax:adapter_tier_hits_total"
    return {tier: sample(name, {"tier": tier}) or 0.0 for tier in ("device", "host", "disk")}
