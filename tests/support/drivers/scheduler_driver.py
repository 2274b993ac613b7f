"""Runs a Scheduler over a FakeDevice, the host some steps behind, and checks every answer."""

import collections
import dataclasses
import random
from collections.abc import Callable

from support.doubles.fake_device import (
    FakeDevice,
    FakeResidency,
    arithmetic,
    digest,
    expected_tokens,
    kv_root,
)

from serving.api.request import FinishReason, Request, Sequence, SequenceState, Share, StepPlan
from serving.api.sampling import Sampling
from serving.scheduling.merge_modes import MergeModes
from serving.scheduling.scheduler import Scheduler, SchedulerLimits
from serving.scheduling.speculation import Speculation

VOCAB = 20
EOS = 0


def limits(**changes) -> SchedulerLimits:
    base = SchedulerLimits(
        num_pages=16,
        page_size=4,
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_logit_rows=6,
        max_queue=1000,
        adapter_wait_s=1000.0,
    )
    return dataclasses.replace(base, **changes)


def random_request(rng: random.Random) -> dict:
    stem = [rng.choice([[1] * 9, [2] * 9, [1] * 4 + [3] * 6]), []][rng.random() < 0.3]
    prompt = stem + [rng.randrange(20) for _ in range(rng.randrange(1, 12))]
    scores = rng.random() < 0.2
    max_tokens = rng.randrange(0 if scores else 1, 20)
    return {
        "prompt": prompt,
        "adapter": rng.choice(["", "", "a", "a", "b", "c", "d", "e"]),
        "salt": rng.choice(["", "", "", "salt"]),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "max_tokens": max_tokens,
        "min_tokens": rng.randrange(max_tokens + 1) if rng.random() < 0.3 else 0,
        "ignore_eos": rng.random() < 0.5,
        "stop_token_ids": [rng.randrange(20)] if rng.random() < 0.3 else [],
        "prompt_logprobs": 1 if scores else None,
        "seed": rng.randrange(100),
    }


class Driver:
    """One second passes per step."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        num_slots: int = 3,
        ticks: int = 2,
        make_modes: Callable[[FakeResidency], MergeModes] | None = None,
        speculation: Speculation | None = None,
    ):
        self.residency = FakeResidency(num_slots, ticks)
        self.device = FakeDevice(limits.num_pages, limits.page_size, VOCAB, self.residency.slots)
        modes = None if make_modes is None else make_modes(self.residency)
        given = {"modes": modes, "speculation": speculation}
        self.scheduler = Scheduler(limits, adapters=self.residency, eos_token_ids=[EOS], **given)
        self.now = 0.0
        self.in_flight: collections.deque = collections.deque()
        self.scores: dict[Sequence, list] = collections.defaultdict(list)
        self.ended: list[Sequence] = []
        self.plans: list[StepPlan] = []
        self._num_requests = 0

    def add(
        self,
        prompt,
        *,
        adapter: str = "",
        deadline_s: float | None = None,
        salt: str = "",
        share: Share | None = None,
        **sampling,
    ) -> list[Sequence]:
        sampling = {"max_tokens": 6, "seed": 1, **sampling}
        self._num_requests += 1
        request = Request(
            request_id=f"r{self._num_requests}",
            prompt_ids=tuple(prompt),
            sampling=Sampling(**sampling),
            adapter=adapter or None,
            adapter_digest=adapter,
            on_output=lambda delta: None,
            arrival_s=self.now,
            deadline_s=self.now if deadline_s is None else deadline_s,
            cache_salt=salt,
            share=share or Share(),
        )
        return self.scheduler.add(request)

    def step(self, depth: int = 1) -> StepPlan | None:
        """Plan one step while at most `depth` earlier ones are not complete."""
        self.now += 1.0
        self.residency.tick()
        self.ended += self.scheduler.expired(self.now)
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.capture(plan)))
            self._check_budgets(plan)
        self.scheduler.check_integrity()
        if plan is not None and plan.has_drafts:
            depth = 0
        while self.in_flight and (len(self.in_flight) > depth or plan is None):
            self.complete_one()
        return plan

    def complete_one(self) -> None:
        plan, captured = self.in_flight.popleft()
        for progress in self.scheduler.complete(plan, self.device.run(captured), self.now):
            self.scores[progress.sequence] += progress.result.prompt_logprobs
            if progress.finish_reason is not None:
                self.ended.append(progress.sequence)
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 1000, depth: int = 1) -> int:
        """Step until nothing is left; returns the number of steps."""
        for taken in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return taken
            self.step(depth)
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def _check_budgets(self, plan: StepPlan) -> None:
        bounds = self.scheduler.limits
        assert 0 < plan.num_tokens <= bounds.max_num_batched_tokens
        assert len(plan.chunks) <= bounds.max_num_seqs
        rows = 0
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0
            rows += chunk.num_samples
            if chunk.prompt_logprobs:
                end = min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt - 1)
                rows += end - chunk.start
        assert rows <= bounds.max_logit_rows


def alone(sequence: Sequence) -> tuple[list[int], FinishReason]:
    """What the sequence must give: what it gives without neighbours, cut at its end."""
    request, sampling = sequence.request, sequence.request.sampling
    adapter = arithmetic(request.adapter_digest, sequence.weights)
    tokens = expected_tokens(
        request.prompt_ids, adapter, sequence.seed, sequence.max_outputs, VOCAB
    )
    for i, token in enumerate(tokens):
        ends = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if ends and i + 1 >= sampling.min_tokens:
            return tokens[: i + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


def expected_scores(sequence: Sequence) -> list[tuple[int, float]]:
    kv = kv_root(arithmetic(sequence.request.adapter_digest, sequence.weights))
    scores = []
    prompt = sequence.request.prompt_ids
    for i, token in enumerate(prompt[:-1]):
        kv = digest(kv, token)
        scores.append((prompt[i + 1], -float(kv % 1000)))
    return scores


def check_answer(driver: Driver, sequence: Sequence) -> None:
    """Assert that an ended sequence gave what it gives alone, or a part of it when it was ended."""
    tokens, reason = alone(sequence)
    assert sequence.state is SequenceState.FINISHED
    if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert sequence.output_ids == tokens[: len(sequence.output_ids)]
        return
    assert sequence.output_ids == tokens
    assert sequence.finish_reason is reason
    if sequence.request.sampling.prompt_logprobs is not None:
        got = [(score.token_id, score.logprob) for score in driver.scores[sequence]]
        assert got == expected_scores(sequence)


def harm(driver: Driver, *adapters: str) -> list[Sequence]:
    """Make all that steps have written, and will write, of these adapters wrong; start anew."""
    digests = frozenset(adapters)
    running = {c.sequence for plan in driver.plans[-3:] for c in plan.chunks}
    pages = [p for s in running if s.request.adapter_digest in digests for p in s.pages]
    lost = driver.scheduler.restart_adapters(digests)
    size = driver.scheduler.limits.page_size
    for place in (page * size + offset for page in pages for offset in range(size)):
        driver.device.kv[place] = 12345
    driver.scheduler.check_integrity()
    return lost
