"""Public engine of Python programs and of the HTTP server.

with Engine("path/to/model", adapters={"sql": "path/to/adapter"}) as engine:
    outputs = engine.generate(["a", "b"], adapter=["sql", None], sampling=Sampling())
"""

import dataclasses
import functools
import os
import queue
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter
from lora_jax.adapters.rollout import Rollout
from lora_jax.adapters.weights import AdapterReport
from serving.api.config import EngineConfig
from serving.api.outputs import RequestFailed, RequestOutput
from serving.api.request import FinishReason, OutputDelta, QueueFull, Request, Share
from serving.api.sampling import Sampling
from serving.engine.batch import Batch
from serving.engine.generate_arguments import (
    Adapters,
    GivenPrompt,
    Prompt,
    Samplings,
    adapter_and_sampling,
    as_list,
    broadcast,
    given_prompt,
)
from serving.engine.live_request import LiveRequest
from serving.engine.loop import EngineLoop
from serving.engine.metrics import EngineStats
from serving.engine.model_info import ModelInfo
from serving.engine.parts import EngineParts, build_parts, engine_stats
from serving.lora_server.instance import ServerAccess
from serving.runtime.compile_counter import CompileCounter

DEFAULT_DEADLINE_S = 60.0  # requests are served in order of their deadlines

Piece = OutputDelta  # what `stream` yields: `.text` is the next piece of text


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """Description of one loaded adapter."""

    name: str
    kind: str
    rank: int  # largest rank of any site; 0 for ESFT
    bytes: int  # weights on the host
    resident: bool  # on the device
    pinned: bool
    digest: str  # sha256 of its files
    report: AdapterReport


class Engine:
    """One base model with its adapters, ready to serve; any thread may call any method.

    Owns a thread and device memory until `close`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        lora_server: ServerAccess | None = None,
        **fields: Any,
    ):
        """Load model and adapters and compile; `fields` are those of `EngineConfig`.

        With `lora_server` the experts' part of LoRA adapters is there. Raises ValueError for a
        config, model or adapter that cannot be served, and ConnectionError when the server cannot
        be reached or does not fit.
        """
        self.config = EngineConfig(model=os.fspath(model), **fields)
        self._parts: EngineParts = build_parts(self.config, dict(adapters or {}), lora_server)
        self._loop = self._parts.loop
        self.tokenizer = self._parts.tokenizer
        self.registry = self._parts.registry
        self.rollouts = self._parts.rollouts
        self.metrics = self._parts.metrics
        self.model_info: ModelInfo = self._parts.model_info
        # Also when the last reference goes, and when the interpreter ends.
        self._close = weakref.finalize(self, _close, self._loop, self._parts.compilations)
        self._loop.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's thread; live requests end with an error. Closing twice is allowed."""
        self._close()

    # Text in, text out.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapter: Adapters | Samplings = None,
        sampling: Samplings = None,
        *,
        sampling_params: Samplings = None,
        lora_request: Any = None,
        use_tqdm: bool = False,
        session: str | None = None,
    ) -> list[RequestOutput]:
        """Return one answer per prompt, in order.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. One
        adapter name (None: the base model) or sampling (None: `default_sampling`) stands for all
        prompts. vLLM's call works too: a sampling in second place, `sampling_params`, and
        `lora_request` with the name of a loaded adapter. `session` names the user whom a rollout
        gives always the same version. Raises KeyError for an unknown adapter,
        ValueError or TypeError for bad input, RequestFailed when the engine could not finish one.
        """
        adapter, sampling = adapter_and_sampling(adapter, sampling, sampling_params, lora_request)
        given = [given_prompt(prompt) for prompt in as_list(prompts)]
        sampling = self.default_sampling() if sampling is None else sampling
        batch = Batch(
            functools.partial(self.submit, session=session),
            [self._prompt_ids(prompt) for prompt in given],
            broadcast("adapter", adapter, len(given), (str, type(None))),
            broadcast("sampling", sampling, len(given), (Sampling,)),
            texts=[prompt.text for prompt in given],
            use_tqdm=use_tqdm,
        )
        try:
            return batch.run()
        finally:
            for request_id in batch.live.values():
                self.abort(request_id)

    def default_sampling(self) -> Sampling:
        """Return `Sampling()` with the defaults of the model's generation_config.json."""
        return Sampling(**self.model_info.sampling_defaults)

    def stream(
        self,
        prompt: Prompt,
        adapter: str | Sampling | None = None,
        sampling: Sampling | None = None,
        *,
        session: str | None = None,
    ) -> Iterator[Piece]:
        """Return an iterator over the pieces of the answer as they are made.

        The request is handed in before this returns; giving up the iteration aborts it.
        """
        name, wanted = adapter_and_sampling(adapter, sampling)
        wanted = self.default_sampling() if wanted is None else wanted
        (name,) = broadcast("adapter", name, 1, (str, type(None)))
        (wanted,) = broadcast("sampling", wanted, 1, (Sampling,))
        deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        ids = self._prompt_ids(given_prompt(prompt))
        request_id = self.submit(ids, name, wanted, on_output=deltas.put, session=session)
        return self._pieces(request_id, deltas, wanted.n)

    def _pieces(
        self, request_id: str, deltas: queue.SimpleQueue[OutputDelta], num_open: int
    ) -> Iterator[Piece]:
        try:
            while num_open:
                delta = deltas.get()
                num_open -= delta.finish_reason is not None
                if delta.finish_reason is FinishReason.ERROR:
                    message = delta.error or "The request failed."
                    raise RequestFailed(message, retryable=delta.retryable)
                yield delta
        finally:
            if num_open:
                self.abort(request_id)

    def _prompt_ids(self, prompt: GivenPrompt) -> list[int]:
        return self.tokenizer.encode(prompt.text or "") if prompt.ids is None else list(prompt.ids)

    # Requests, as the HTTP server makes them.

    def submit(
        self,
        prompt_ids: Sequence[int],
        adapter: str | None,
        sampling: Sampling,
        *,
        on_output: Callable[[OutputDelta], None],
        request_id: str | None = None,
        cache_salt: str = "",
        deadline_s: float | None = None,
        share: Share | None = None,
        entry: AdapterEntry | None = None,
        session: str | None = None,
    ) -> str:
        """Queue a request and return its id; `on_output` is called from the engine's thread.

        `deadline_s` is seconds from now: waiting requests are served in that order, those of
        each `share` beside those of others. `entry` is what the adapter's name stood for; without
        it a rollout chooses the version by `session`, or by the request's id, and an adapter whose
        weights are not in memory is read here and now. Raises AdapterNotFound (a KeyError),
        ValueError, QueueFull or EngineDead.
        """
        request_id = request_id or secrets.token_hex(12)
        if entry is None and adapter is not None:
            adapter = self.rollouts.pick(adapter, session or request_id)
        entry = self._check(prompt_ids, adapter, sampling, entry)
        now = time.monotonic()
        request = Request(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            adapter=adapter,
            adapter_digest="" if entry is None else entry.digest,
            on_output=on_output,
            arrival_s=now,
            deadline_s=now + (DEFAULT_DEADLINE_S if deadline_s is None else deadline_s),
            cache_salt=cache_salt,
            share=share or Share(),
        )
        self._queue(request, entry)
        return request.request_id

    def _queue(self, request: Request, entry: AdapterEntry | None) -> None:
        try:
            self._loop.submit(
                request,
                entry,
                lambda sequences: LiveRequest(request, sequences, self.tokenizer, self.metrics),
            )
        except QueueFull:
            self.metrics.rejected("queue_full")
            raise
        except ValueError:
            self.metrics.rejected("invalid")
            raise
        except RuntimeError:
            self.metrics.rejected("engine_dead")
            raise

    def _check(
        self,
        prompt_ids: Sequence[int],
        adapter: str | None,
        sampling: Sampling,
        entry: AdapterEntry | None,
    ) -> AdapterEntry | None:
        """Return the adapter's entry; raises, and counts, what makes a request impossible."""
        try:
            self._check_numbers(prompt_ids, sampling)
            return None if adapter is None else entry or self.rollouts.resolve(adapter)
        except KeyError:
            self.metrics.rejected("adapter_not_found")
            raise
        except ValueError:
            self.metrics.rejected("invalid")
            raise

    def _check_numbers(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        vocab = self.model_info.vocab_size
        sampling.check_vocab(vocab)
        bad = next((token for token in prompt_ids if not 0 <= token < vocab), None)
        if bad is not None:
            raise ValueError(f"prompt token id must be in [0, {vocab - 1}], got {bad}.")
        limit = self.config.max_logprobs
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(sampling, field) or 0) > limit:
                raise ValueError(f"{field} must be at most {limit} on this server.")

    def abort(self, request_id: str) -> None:
        """End a request soon; its choices get a last delta with finish_reason ABORT."""
        self._loop.abort(request_id)

    # Adapters.

    def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        pinned: bool = False,
    ) -> AdapterInfo:
        """Read an adapter folder and publish it under a name; blocks while files are read.

        With `replace` the name's old weights serve the requests they were admitted with, new
        requests get the new ones. `pinned` keeps it on the device. Raises AdapterRejected (a
        ValueError), AdapterExists or AdapterNotFound, and then nothing has changed.
        """
        entry = self.registry.load(name, path, replace=replace, pinned=pinned, confined=False)
        self._loop.wake()
        return self._info(entry)

    def unload_adapter(self, name: str) -> None:
        """Forget a name: new requests for it fail at once, running ones finish, then it goes.

        Raises AdapterNotFound (a KeyError), and ValueError for a version with a share of a rollout.
        """
        self.rollouts.check_unload(name)
        self.registry.unload(name)
        self._loop.wake()

    def rollout(
        self,
        name: str,
        versions: Mapping[str, float] | None = None,
        /,
        *,
        guard: Mapping[str, Any] | None = None,
        **shares: float,
    ) -> Rollout:
        """Give loaded versions of an adapter their shares in percent: rollout("sql", v1=95, v2=5).

        Versions whose names are no Python names go into `versions`. `guard` has the fields of
        `lora_jax.adapters.rollout_guard.Guard`. A user keeps a version; a raised share of a newer
        version moves users to it only. Raises ValueError, and then nothing has changed.
        """
        return self.rollouts.set(name, {**(versions or {}), **shares}, guard)

    def rollback(self, name: str) -> Rollout:
        """Take the newest version's users back to older ones; running requests end on theirs.

        Raises KeyError for an adapter without a rollout, ValueError where nothing is older.
        """
        return self.rollouts.roll_back(name)

    def adapters(self) -> list[AdapterInfo]:
        """Return all known adapters in order of name, also those read again on their next use."""
        return [self._info(entry) for entry in self.registry.known()]

    def _info(self, entry: AdapterEntry | EvictedAdapter) -> AdapterInfo:
        return AdapterInfo(
            name=entry.name,
            kind=entry.kind,
            rank=entry.report.max_rank,
            bytes=entry.report.weight_bytes,
            resident=entry.digest in self._parts.residencies.snapshot.resident,
            pinned=entry.pinned,
            digest=entry.digest,
            report=entry.report,
        )

    # State.

    def is_alive(self) -> bool:
        """True if the engine accepts requests and its loop has run recently."""
        return self._loop.is_alive

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges."""
        parts = self._parts
        return engine_stats(
            parts.loop, parts.registry, parts.residencies, parts.metrics, parts.compilations
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when an idle engine holds anything it should not."""
        self._loop.check_integrity()


def _close(loop: EngineLoop, compilations: CompileCounter) -> None:
    loop.close()
    compilations.close()
