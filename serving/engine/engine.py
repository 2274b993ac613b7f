"""Public engine of Python programs and of the HTTP server.

with Engine("path/to/model", adapters={"sql": "path/to/adapter"}) as engine:
    outputs = engine.generate(["a", "b"], adapter=["sql", None], sampling=Sampling())
"""

import functools
import os
import queue
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter
from lora_jax.memory.arena import ImportedArena
from serving.adapters.rollout import Rollout
from serving.api.images import PlacedImages
from serving.api.outputs import RequestOutput, failure
from serving.api.request import FinishReason, OutputDelta, Request, Share, TraceContext
from serving.api.sampling import Sampling
from serving.engine.adapter_info import AdapterInfo, adapter_info
from serving.engine.admission import Admission
from serving.engine.classification import HEAD_SAMPLING, Classification, classified
from serving.engine.images.front import ImageFront
from serving.engine.inputs.batch import Batch
from serving.engine.inputs.chat_prompts import Messages, chat_prompts, taken_options
from serving.engine.inputs.engine_arguments import adapters_of, config_of
from serving.engine.inputs.generate_arguments import (
    Adapter,
    Adapters,
    Prompt,
    Samplings,
    adapter_and_sampling,
    as_list,
    broadcast,
    given_prompt,
    with_images,
)
from serving.engine.inputs.image_inputs import read_prompts
from serving.engine.inputs.sessions import KeyedTokenizers, Session, keys_of
from serving.engine.inputs.single_prompt import single_prompt
from serving.engine.loop.loop_parts import AbstractTurns
from serving.engine.metrics.stats import EngineStats
from serving.engine.metrics.tier_metrics import tier_of
from serving.engine.parts.model_info import ModelInfo
from serving.engine.parts.parts import EngineParts, build_parts
from serving.lora_server.sides import RemoteAccess
from serving.runtime.gang import Gang

DEFAULT_DEADLINE_S = 60.0  # requests are served in order of their deadlines

Piece = OutputDelta  # what `stream` yields: `.text` is the next piece of text


class Engine:
    """One base model with its adapters; any thread may call any method.

    The engine owns a thread and device memory until `close`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        lora_server: RemoteAccess | None = None,
        backbone: ImportedArena | None = None,
        turns: AbstractTurns | None = None,
        gang: Gang | None = None,
        pinned: Collection[str] = (),
        **fields: Any,
    ):
        """Load model and adapters and compile; `fields` are those of `EngineConfig`.

        The adapters named in `pinned` stay on the device. With `lora_server` the experts' part of
        LoRA adapters is on that server. With `backbone` the weights are in another process's
        memory, which the engine reads; with `turns` the engine shares the device with other
        processes in turns. With `gang`, of which this process is rank 0, the model is split over
        the devices of all members. Raises ValueError for a config, model or adapter that cannot be
        served, and ConnectionError when the server cannot be reached or does not match.
        """
        config = config_of(model, fields)
        self._parts: EngineParts = build_parts(
            config, adapters_of(adapters), lora_server, backbone, turns, gang, pinned
        )
        self.config, self._loop = self._parts.config, self._parts.loop
        self._admission = Admission(self._parts, self.config.max_logprobs)
        self.tokenizer, self.tokenizer_of = self._parts.tokenizer, self._parts.tokenizers.of
        self.registry = self._parts.registry
        self.rollouts, self.compositions = self._parts.rollouts, self._parts.compositions
        self.metrics, self.grammars = self._parts.metrics, self._parts.grammars
        self.remember_prefixes = self._parts.remember_prefixes
        self.model_info: ModelInfo = self._parts.model_info
        self.images: ImageFront | None = self._parts.images  # None: the model takes text only
        # Also when the last reference goes, and when the interpreter ends.
        self._close = weakref.finalize(self, self._parts.close)
        self._loop.start()
        if gang is not None:
            gang.serve()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free all its memory; live requests get an error. Twice is allowed."""
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
        images: Any = None,
        session: Session = None,
    ) -> list[RequestOutput]:
        """Return one answer per prompt, in order.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. Its
        images are in its dict (`multi_modal_data`) or in `images`, a list for one prompt, a list of
        lists for several; the prompt contains the model's placeholder for each image. `adapter` is
        a name, None for the base model, or a weighted sum such as {"law": 0.7, "formal": 0.5};
        `sampling` of None is `default_sampling`. One adapter or sampling applies to all prompts.
        vLLM's call works too: a sampling as the second argument, `sampling_params`, and
        `lora_request` with the name of a loaded adapter. In a rollout, prompts with the same
        `session` (a text, or one for each) get the same version. Raises KeyError for an unknown
        adapter, ValueError or TypeError for bad input (BadRequest, a ValueError, if that shows only
        while the answer is made), another RequestFailed when the engine could not finish a request.
        """
        adapter, sampling = adapter_and_sampling(adapter, sampling, sampling_params, lora_request)
        sampling = self.default_sampling() if sampling is None else sampling
        return self._answers(prompts, images, adapter, sampling, use_tqdm, session)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapter: Adapters = None,
        *,
        lora_request: Any = None,
        use_tqdm: bool = False,
        images: Any = None,
        session: Session = None,
    ) -> list[Classification]:
        """Return the answer of the adapter's task head to each prompt, in order.

        A request is one forward pass over the prompt. Arguments and errors are those of `generate`;
        an adapter without a task head is a ValueError too.
        """
        adapter, _ = adapter_and_sampling(adapter, None, None, lora_request)
        given = prompts, images, adapter, HEAD_SAMPLING, use_tqdm, session
        return [classified(output) for output in self._answers(*given, by_head=True)]

    def _answers(
        self,
        prompts: Prompt | Sequence[Prompt],
        images: Any,
        adapter: Adapters,
        sampling: Samplings,
        use_tqdm: bool,
        session: Session,
        by_head: bool = False,
    ) -> list[RequestOutput]:
        given = with_images([given_prompt(prompt) for prompt in as_list(prompts)], images)
        names = broadcast("adapter", adapter, len(given), (str, Mapping, type(None)))
        keys = keys_of(session, len(given))
        ids, placed = read_prompts(list(map(self.tokenizer_of, names, keys)), self.images, given)
        batch = Batch(
            functools.partial(self.submit, by_head=by_head),
            ids,
            names,
            broadcast("sampling", sampling, len(given), (Sampling,)),
            texts=[prompt.text for prompt in given],
            images=placed,
            sessions=keys,
            use_tqdm=use_tqdm,
        )
        try:
            return batch.run()
        finally:
            for request_id in batch.live.values():
                self.abort(request_id)

    def chat(
        self,
        messages: Messages,
        adapter: Adapters | Samplings = None,
        sampling: Samplings = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return the answer to each conversation, a list of messages, or to the only one.

        A message's content is a text or a list of parts: {"type": "text", "text": ...} and {"type":
        "image", "image": ...} with an image as `generate` takes it. `options` and errors are those
        of `generate`; further options those of `chat_prompts`: add_generation_prompt, tools, ...
        """
        chat_options = taken_options(options)
        vllm = (options.get(name) for name in ("sampling_params", "lora_request"))
        named, _ = adapter_and_sampling(adapter, sampling, *vllm)
        tokenizers = KeyedTokenizers(self.tokenizer_of, options.pop("session", None))
        prompts = chat_prompts(tokenizers, self.images, messages, named, **chat_options)
        return self.generate(prompts, adapter, sampling, session=tokenizers.keys, **options)

    def default_sampling(self) -> Sampling:
        """Return `Sampling()` with the defaults of the model's generation_config.json."""
        return Sampling(**self.model_info.sampling_defaults)

    def stream(
        self,
        prompt: Prompt,
        adapter: Adapter | Sampling = None,
        sampling: Sampling | None = None,
        *,
        images: Any = None,
        session: str | None = None,
    ) -> Iterator[Piece]:
        """Return an iterator over the pieces of the answer as they are made.

        The request is submitted before this returns; ending the iteration early aborts it.
        """
        tokenizers = KeyedTokenizers(self.tokenizer_of, session)
        default = self.default_sampling()
        read = single_prompt(tokenizers, self.images, default, prompt, adapter, sampling, images)
        deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        options = {"on_output": deltas.put, "images": read.images, "session": tokenizers.keys[0]}
        request_id = self.submit(read.ids, read.adapter, read.sampling, **options)
        return self._pieces(request_id, deltas, read.sampling.n)

    def _pieces(
        self, request_id: str, deltas: queue.SimpleQueue[OutputDelta], num_open: int
    ) -> Iterator[Piece]:
        try:
            while num_open:
                delta = deltas.get()
                num_open -= delta.finish_reason is not None
                if delta.finish_reason is FinishReason.ERROR:
                    raise failure(delta)
                yield delta
        finally:
            if num_open:
                self.abort(request_id)

    # Requests, as the HTTP server makes them.

    def submit(
        self,
        prompt_ids: Sequence[int],
        adapter: Adapter,
        sampling: Sampling,
        *,
        on_output: Callable[[OutputDelta], None],
        request_id: str | None = None,
        cache_salt: str = "",
        deadline_s: float | None = None,
        share: Share | None = None,
        entry: AdapterEntry | None = None,
        images: PlacedImages = (),
        session: str | None = None,
        grammar: Any = None,
        by_head: bool = False,
        trace: TraceContext | None = None,
    ) -> str:
        """Queue a request and return its id; `on_output` is called from the engine's thread.

        `deadline_s` is seconds from now: waiting requests are served in that order, those of
        each `share` beside those of others. `entry` is what the adapter's name stood for; without
        it a rollout chooses the version by `session`, or by the request's id, and an adapter whose
        weights are not in memory is read here and now, once host memory has room for it. `images`
        come with their first tokens, `grammar` is compiled. `by_head` has the adapter's task head
        answer, after one forward pass over the prompt, in place of the LM head: `sampling` must be
        `HEAD_SAMPLING`. The span of the request, where spans are sent, is part of `trace`. Raises
        AdapterNotFound, ValueError, QueueFull or EngineDead.
        """
        prompt_ids = tuple(prompt_ids)
        request_id = request_id or os.urandom(12).hex()
        now = time.monotonic()
        deadline = now + (DEFAULT_DEADLINE_S if deadline_s is None else deadline_s)
        options = {"key": session or request_id, "deadline": deadline}
        options |= self._admission.room(adapter)
        named = functools.partial(self.rollouts.entry_for, **options)
        name, entry = self._admission.check(prompt_ids, adapter, sampling, entry, named)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            adapter=name,
            adapter_digest="" if entry is None else entry.digest,
            tier=tier_of(entry, self.registry, self._parts.residencies.holds),
            on_output=on_output,
            arrival_s=now,
            deadline_s=deadline,
            cache_salt=cache_salt,
            share=share or Share(),
            grammar=grammar,
            trace=trace,
            images=self._admission.placed(prompt_ids, images, entry, cache_salt),
            head=self._admission.head_of(name, entry, sampling) if by_head else None,
        )
        self._admission.queue(request, entry)
        return request.request_id

    def compose(self, parts: Sequence[tuple[AdapterEntry, float]]) -> AdapterEntry:
        """Return the entry that serves a weighted sum; see Compositions.entry for its errors."""
        return self.compositions.entry(parts)

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

        With `replace`, running requests finish on the old weights and new requests get the new
        ones. `pinned` keeps the adapter on the device. Raises AdapterRejected (a
        ValueError), AdapterExists or AdapterNotFound, and then nothing has changed.
        """
        entry = self.registry.load(name, path, replace=replace, pinned=pinned, confined=False)
        self._loop.wake()
        return self._info(entry)

    def unload_adapter(self, name: str) -> None:
        """Remove a name: new requests for it fail at once, and running ones finish first.

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
        guard: Mapping[str, Any] | Literal["keep"] | None = "keep",
        **shares: float,
    ) -> Rollout:
        """Give loaded versions of an adapter their shares in percent: rollout("sql", v1=95, v2=5).

        Versions whose names are no Python identifiers go into `versions`. `guard` has the fields of
        `serving.adapters.rollout_guard.Guard`; "keep" leaves the guard as it is, None removes it.
        A user keeps a version; if the share of a newer version is raised, users only move to it.
        Raises ValueError, and then nothing has changed.
        """
        given = {} if versions is None else versions  # what is no mapping is refused
        given = {**given, **shares} if isinstance(given, Mapping) else given
        return self.rollouts.set(name, given, guard)

    def rollback(self, name: str) -> Rollout:
        """Move the newest version's users to older versions; running requests keep theirs.

        Raises KeyError for an adapter without a rollout, ValueError without an older version.
        """
        return self.rollouts.roll_back(name)

    def adapters(self) -> list[AdapterInfo]:
        """Return all known adapters in order of name, including those evicted from memory."""
        return [self._info(entry) for entry in self.registry.known()]

    def _info(self, entry: AdapterEntry | EvictedAdapter) -> AdapterInfo:
        return adapter_info(entry, self._parts.residencies.snapshot.resident)

    # State.

    def is_alive(self) -> bool:
        """True if the engine accepts requests and its loop has run recently."""
        return self._loop.is_alive

    @property
    def end(self) -> Future[Exception | None]:
        """Done when the engine has ended, with the error that ended it, or None after `close`."""
        return self._loop.end

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges."""
        return self._parts.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError when an idle engine holds anything it should not."""
        self._loop.check_integrity()
