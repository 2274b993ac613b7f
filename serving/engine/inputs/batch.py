"""`Engine.generate`: many prompts at once, in order, with a progress bar."""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from lora_jax.adapters.composition import parts_of, shown
from serving.api.images import PlacedImages
from serving.api.outputs import OutputCollector, RequestOutput
from serving.api.request import OutputDelta, QueueFull
from serving.api.sampling import Sampling
from serving.engine.inputs.generate_arguments import Adapter


class Batch:
    """Prompts that are handed to an engine as its queue takes them, and their answers."""

    def __init__(
        self,
        submit: Callable[..., str],
        prompts: Sequence[list[int]],
        adapters: Sequence[Adapter],
        samplings: Sequence[Sampling],
        *,
        texts: Sequence[str | None] | None = None,
        images: Sequence[PlacedImages] | None = None,
        sessions: Sequence[str] | None = None,
        use_tqdm: bool,
    ):
        """`submit` is Engine.submit; `texts` are the prompts that came as text."""
        self._submit = submit
        self._requests = list(zip(prompts, adapters, samplings, strict=True))
        self._images = images or [()] * len(prompts)
        self._sessions = sessions
        self._collectors = [
            OutputCollector(tuple(prompt), shown_name(adapter), sampling.n, text)
            for (prompt, adapter, sampling), text in zip(
                self._requests, texts or [None] * len(prompts), strict=True
            )
        ]
        self._deltas: queue.SimpleQueue[tuple[int, OutputDelta]] = queue.SimpleQueue()
        self.live: dict[int, str] = {}  # place -> request id
        self._started_s = time.perf_counter()
        self._tokens_in = self._tokens_out = 0
        self._bar = tqdm(total=len(prompts), desc="Prompts", unit="") if use_tqdm else None

    def run(self) -> list[RequestOutput]:
        """Return all answers in order; raises what `submit` raises, or RequestFailed."""
        if self._bar is None:
            self._run()
        else:
            with self._bar:
                self._run()
        return [collector.output() for collector in self._collectors]

    def _run(self) -> None:
        for index in range(len(self._requests)):
            self._hand_in(index)
        while self.live:
            self._take_delta()

    def _hand_in(self, index: int) -> None:
        """Submit one prompt; while the queue is full, make room by taking in answers."""
        prompt, adapter, sampling = self._requests[index]

        def on_output(delta: OutputDelta) -> None:
            self._deltas.put((index, delta))

        while True:
            try:
                more: dict[str, Any] = {}
                if self._images[index]:
                    more["images"] = self._images[index]
                if self._sessions is not None:
                    more["session"] = self._sessions[index]
                self.live[index] = self._submit(
                    prompt, adapter, sampling, on_output=on_output, **more
                )
                return
            except QueueFull as full:
                if not self.live:
                    time.sleep(full.retry_after_s)
                while self.live and not self._take_delta():
                    pass

    def _take_delta(self) -> bool:
        """Wait for the next delta; returns whether a request has ended with it."""
        index, delta = self._deltas.get()
        collector = self._collectors[index]
        collector.add(delta)
        self._tokens_out += len(delta.token_ids)
        if not collector.done:
            return False
        del self.live[index]
        self._tokens_in += len(self._requests[index][0])
        if self._bar is None:
            return True
        seconds = time.perf_counter() - self._started_s
        rates = [count / seconds for count in (self._tokens_in, self._tokens_out)]
        text = f"est. speed input: {rates[0]:.1f} toks/s, output: {rates[1]:.1f} toks/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        return True


def shown_name(adapter: Adapter) -> str | None:
    """Return the name of an adapter, or of a weighted sum; ValueError for a sum that is none."""
    if adapter is None or isinstance(adapter, str):
        return adapter
    return shown((part.name, part.weight) for part in parts_of(adapter))
