"""Engine for programs with an event loop, as vLLM's AsyncLLM: answers are awaited.

async with AsyncEngine(Engine("path/to/model", adapters={"sql": "path/to/adapter"})) as engine:
    async for output in engine.generate("a", Sampling(), request_id="1", adapter="sql"):
        print(output.outputs[0].text)
"""

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.registry_errors import HostFull
from serving.adapters.entry_turn import entry_in_turn
from serving.api.outputs import OutputCollector, RequestOutput, failure
from serving.api.request import FinishReason, OutputDelta
from serving.api.sampling import Sampling
from serving.engine.adapter_info import AdapterInfo
from serving.engine.engine import Engine, Piece
from serving.engine.inputs.batch import shown_name
from serving.engine.inputs.chat_prompts import (
    ASYNC_OPTIONS,
    Conversation,
    chat_prompts,
    taken_options,
)
from serving.engine.inputs.generate_arguments import Adapter, Prompt, adapter_and_sampling
from serving.engine.inputs.sessions import new_key
from serving.engine.inputs.single_prompt import SinglePrompt, single_prompt
from serving.runtime.mailbox import Inbox, Mailbox
from serving.text.tokenizer import Tokenizer


class AsyncEngine:
    """An `Engine` for asyncio programs, in any number of event loops.

    `close` also closes the engine. Until then the engine's own methods can be used too:
    `engine.stats()`, `engine.rollout(...)`.
    """

    def __init__(self, engine: Engine):
        """Wrap a started engine. Start it before the event loop runs, because that takes long."""
        if not isinstance(engine, Engine):
            raise TypeError(
                f"AsyncEngine takes an Engine, got {type(engine).__name__}: write "
                "AsyncEngine(Engine(model, ...))."
            )
        self.engine = engine
        self._mailbox = Mailbox()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine; live requests fail with RequestFailed. Closing twice is allowed."""
        await asyncio.to_thread(self.engine.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        request_id: str | None = None,
        *,
        adapter: str | Mapping[str, float] | None = None,
        sampling_params: Sampling | None = None,
        lora_request: Any = None,
        images: Any = None,
        session: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the answer to a prompt as it grows; the last one is `finished`.

        Arguments are those of `Engine.generate`, for one prompt. Tokens that arrive while the
        caller is busy are in one output. Ending the iteration early, or canceling its task, aborts
        the request.
        Raises what `Engine.generate` raises, and ValueError for a `request_id` that is in use.
        """
        given = {"adapter": adapter, "sampling": sampling, "images": images}
        vllm = {"sampling_params": sampling_params, "lora_request": lora_request}
        answer = _Answer(self.engine, self._mailbox, request_id)
        read = await answer.hand_in(prompt, session, **given, **vllm)
        shown, n = shown_name(read.adapter), read.sampling.n
        collector = OutputCollector(tuple(read.ids), shown, n, read.text)
        try:
            while not collector.done:
                for delta in await answer.deltas():
                    collector.add(delta)
                yield collector.output()
        finally:
            answer.leave(is_done=collector.done)

    async def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        request_id: str | None = None,
        *,
        adapter: str | Mapping[str, float] | None = None,
        images: Any = None,
        session: str | None = None,
    ) -> AsyncGenerator[Piece]:
        """Yield the pieces of the answer as they are made; otherwise like `generate`."""
        answer = _Answer(self.engine, self._mailbox, request_id)
        given = {"adapter": adapter, "sampling": sampling, "images": images}
        num_open = (await answer.hand_in(prompt, session, **given)).sampling.n
        try:
            while num_open:
                for delta in await answer.deltas():
                    num_open -= delta.finish_reason is not None
                    if delta.finish_reason is FinishReason.ERROR:
                        raise failure(delta)
                    yield delta
        finally:
            answer.leave(is_done=not num_open)

    async def chat(
        self,
        messages: Conversation,
        sampling: Sampling | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the answer to one conversation as it grows; messages are as `Engine.chat` has them.

        `options` are add_generation_prompt and the others of `Engine.chat`, and `generate`'s.
        """
        engine = self.engine
        of_chats = taken_options(options, "AsyncEngine.chat", ASYNC_OPTIONS)
        vllm = (options.get(name) for name in ("sampling_params", "lora_request"))
        named, _ = adapter_and_sampling(options.get("adapter"), sampling, *vllm)
        options["session"] = session = options.get("session") or new_key()
        tokenizer_of = functools.partial(engine.tokenizer_of, session=session)
        prompts = await asyncio.to_thread(
            chat_prompts, tokenizer_of, engine.images, messages, named, **of_chats
        )
        if len(prompts) != 1:
            raise ValueError(f"AsyncEngine.chat takes one conversation, got {len(prompts)}.")
        outputs = self.generate(prompts[0], sampling, request_id, **options)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request soon: its last output has finish_reason ABORT. Unknown ones are ignored."""
        self.engine.abort(request_id)

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str], **options: Any
    ) -> AdapterInfo:
        """Do what `Engine.load_adapter` does, without blocking the event loop."""
        return await asyncio.to_thread(self.engine.load_adapter, name, path, **options)

    async def unload_adapter(self, name: str) -> None:
        """Do what `Engine.unload_adapter` does."""
        await asyncio.to_thread(self.engine.unload_adapter, name)


class _Answer:
    """One request, whose deltas the engine's thread sends to the event loop."""

    def __init__(self, engine: Engine, mailbox: Mailbox, request_id: str | None):
        self._engine, self._mailbox = engine, mailbox
        self._request_id = request_id or secrets.token_hex(12)
        self._loop = asyncio.get_running_loop()
        self._queue: Inbox[OutputDelta] = Inbox()
        self._is_left = False

    async def hand_in(self, prompt: Prompt, session: str | None, **given: Any) -> SinglePrompt:
        """Submit the request. Texts, images and adapters of the disk are read in a thread.

        That thread cannot be stopped: a request that it submits for a canceled task is aborted. It
        does not wait for host memory, except for parts of a weighted sum.
        """
        try:
            entry = await self._entry(session, **given)
            return await asyncio.to_thread(self._submit, prompt, session, entry, given)
        except asyncio.CancelledError:
            self._is_left = True
            self._engine.abort(self._request_id)
            raise

    async def deltas(self) -> list[OutputDelta]:
        """Wait for the next delta; return it and all that have arrived by then."""
        items = [await self._queue.get()]
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    def leave(self, *, is_done: bool) -> None:
        """End the request unless it is done."""
        if not is_done:
            self._engine.abort(self._request_id)

    async def _entry(
        self, session: str | None, adapter: Any, sampling: Any, images: Any, **vllm: Any
    ) -> AdapterEntry | None:
        """Return the entry of an adapter that is asked for alone, once host memory has room for it.

        None: there is none, or handing in the request says what is wrong.
        """
        engine = self._engine
        try:
            name, _ = adapter_and_sampling(adapter, sampling, **vllm)
            if not isinstance(name, str):
                return None
            chosen = engine.rollouts.pick(name, session or self._request_id)
            return await entry_in_turn(engine, chosen)
        except HostFull:
            raise
        except (KeyError, TypeError, ValueError):
            return None

    def _submit(
        self, prompt: Prompt, session: str | None, entry: AdapterEntry | None, given: dict[str, Any]
    ) -> SinglePrompt:
        engine, put = self._engine, self._mailbox.put
        default = engine.default_sampling()

        def tokenizer_of(named: Adapter) -> Tokenizer:
            return engine.tokenizer_of(named if entry is None else entry, session)

        read = single_prompt(tokenizer_of, engine.images, default, prompt, **given)

        def on_output(delta: OutputDelta) -> None:
            put(self._loop, self._queue, delta)

        options: dict[str, Any] = {"on_output": on_output, "request_id": self._request_id}
        options |= {"images": read.images, "session": session, "entry": entry}
        name = read.adapter if entry is None else entry.name
        engine.submit(read.ids, name, read.sampling, **options)
        if self._is_left:  # set before the abort that came too early
            engine.abort(self._request_id)
        return read
