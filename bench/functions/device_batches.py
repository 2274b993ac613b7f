"""Worth of a shared backbone and of turns on a device: batches, tokens and first tokens.

`batches` is Table 2 of ServerlessLoRA (arXiv 2505.14468), measured: two functions with weights of
their own hold the paper's batch each; over one backbone they have the same bytes for larger ones.
`slicing` compares turns with functions that the driver slices the device among as it likes.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from bench.functions.measured import first_tokens, token_rate
from bench.functions.sweeps import PAPERS_BATCH
from serving import Sampling
from serving.functions import Agent, Function

PROMPT_TOKENS, ANSWER_TOKENS = 50, 100  # the paper's
_PAGE_TOKENS = 16
_WORDS = 200  # of the vocabulary that prompts differ by
_FIELDS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_lora_rank": 16,
    "enable_prefix_caching": False,
}


def batches(
    model: Path,
    adapters: Sequence[Path],
    token_bytes: int,
    seconds: float,
    device_mib: Callable[[], float],
    batch: int = PAPERS_BATCH,
) -> dict[str, Any]:
    """Return the rate of two functions over one backbone, and of one with weights of its own.

    Two with weights of their own that take turns have at most the rate of one. `batch` is theirs;
    the others have the KV pages that a second backbone would take. `token_bytes` are of the keys
    and values of one token, `device_mib()` are in use on the device. `mib` of each way are what
    its two functions take with their backbones.
    """
    request = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // _PAGE_TOKENS) * _PAGE_TOKENS * token_bytes
    before, own = device_mib(), _sizes(batch, request)
    with Agent(model, **own) as one, Agent(model, **own) as two:
        functions = [agent.function(a) for agent, a in zip((one, two), adapters, strict=True)]
        _warm(functions, batch)
        rate = token_rate(functions[:1], _prompts(batch), _answer(), seconds)
        private = {"batch": batch, "tokens_per_s": round(rate), "mib": device_mib() - before}
        backbone_bytes = one.backbone_bytes
    larger = batch + int(backbone_bytes / 2 / request)
    with Agent(model, **_sizes(larger, request)) as agent:
        functions = [agent.function(adapter) for adapter in adapters]
        _warm(functions, larger)
        rate = token_rate(functions, _prompts(larger), _answer(), seconds)
        shared = {"batch": larger, "tokens_per_s": round(rate), "mib": device_mib() - before}
    return {
        "request_mib": request / 2**20,
        "private": private,
        "shared": shared,
        "times_batch": round(larger / batch, 2),
        "times_tokens": round(shared["tokens_per_s"] / max(1, private["tokens_per_s"]), 2),
    }


def slicing(
    model: Path, adapters: Sequence[Path], counts: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Return, for each number of functions, with turns and without, the 95th percentile in
    milliseconds of first tokens of streams of 64 tokens, one at a time to each function."""
    rows = []
    for turns in (True, False):
        # On a GPU an agent always gives turns; without a keeper the driver slices the time.
        keeps = mock.patch("serving.functions.agent.TurnKeeper", return_value=None)
        sizes: dict[str, Any] = _FIELDS | {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30}
        with contextlib.nullcontext() if turns else keeps:
            agent = Agent(model, **sizes)
        with agent:
            functions = [agent.function(adapter) for adapter in adapters[: max(counts)]]
            _warm(functions, 8)
            for count in counts:
                first = first_tokens(functions[:count], seconds, _prompt)
                p95 = sorted(first)[int(0.95 * len(first))]
                row = {
                    "functions": count,
                    "turns": agent.turns is not None,
                    "p95_ttft_ms": round(1e3 * p95, 1),
                }
                rows.append(row | {"streams": len(first)})
    return rows


def _sizes(batch: int, request: int) -> dict[str, Any]:
    room = (batch + 1) * request  # one request more than run at once
    return _FIELDS | {"max_num_seqs": batch, "kv_cache_memory_bytes": room}


def _warm(functions: Sequence[Function], batch: int) -> None:
    for function in functions:
        function.generate(_prompts(batch), Sampling(temperature=0, max_tokens=8, ignore_eos=True))


def _prompts(count: int) -> list[list[int]]:
    return [[1 + at % _WORDS, *range(2, PROMPT_TOKENS + 1)] for at in range(count)]


def _prompt() -> list[int]:
    """Return a prompt that differs from the last ones."""
    return [1 + time.perf_counter_ns() % _WORDS, *range(2, PROMPT_TOKENS + 1)]


def _answer() -> Sampling:
    return Sampling(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
