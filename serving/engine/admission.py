"""Admission of requests to the engine: impossible ones are refused, and counted by the reason."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.task_head import TaskHead
from serving.api.images import PlacedImages, PromptImage
from serving.api.request import QueueFull, Request
from serving.api.sampling import Sampling
from serving.engine.classification import asked_head
from serving.engine.inputs.generate_arguments import Adapter
from serving.engine.inputs.image_inputs import placed_images
from serving.engine.loop.live_request import LiveRequest
from serving.engine.parts.parts import EngineParts
from serving.text.bad_words import BadWords


class Admission:
    """Checks requests and hands them to the engine's loop; any thread may call it."""

    def __init__(self, parts: EngineParts, max_logprobs: int):
        self._loop, self._tokenizers, self._images = parts.loop, parts.tokenizers, parts.images
        self._metrics, self._compositions = parts.metrics, parts.compositions
        self._vocab_size, self._max_logprobs = parts.model_info.vocab_size, max_logprobs
        self._registry, self._primary = parts.registry, parts.primary
        self._adapter_wait_s = parts.config.adapter_wait_s
        self._grammars = parts.grammars
        self._bad_words = BadWords(self._vocab_size)
        self._end_ids = parts.model_info.end_token_ids

    def check(
        self,
        prompt_ids: Sequence[int],
        adapter: Adapter,
        sampling: Sampling,
        entry: AdapterEntry | None,
        named: Callable[[str], AdapterEntry],
    ) -> tuple[str | None, AdapterEntry | None]:
        """Return the adapter's name and entry; raises, and counts, what is impossible."""
        try:
            self._check_numbers(prompt_ids, sampling)
            if self._primary is not None:
                return self._check_primary(adapter, entry, named)
            if isinstance(adapter, str) and entry is not None:
                return adapter, entry
            if adapter is None:
                return None, None
            entry = self._compositions.resolve(adapter, named)
            return entry.name, entry
        except KeyError:
            self._metrics.rejected("adapter_not_found")
            raise
        except ValueError:
            self._metrics.rejected("invalid")
            raise

    def room(self, adapter: Adapter) -> dict[str, Any]:
        """Return how `Rollouts.entry_for` waits for host memory: not in the thread that frees it.

        Parts of a sum are not held: two sums would wait for each other's room.
        """
        wait_s = 0.0 if self._loop.is_this_thread else self._adapter_wait_s
        is_sum = not isinstance(adapter, str) and isinstance(adapter, Mapping)
        return {"wait_s": wait_s, "lends": not is_sum}

    def head_of(self, name: str | None, entry: AdapterEntry | None, sampling: Sampling) -> TaskHead:
        """Return the task head that is asked; raises, and counts, where there is none."""
        try:
            return asked_head(name, entry, sampling)
        except ValueError:
            self._metrics.rejected("invalid")
            raise

    def placed(
        self,
        prompt_ids: Sequence[int],
        images: PlacedImages,
        entry: AdapterEntry | None,
        salt: str,
    ) -> tuple[PromptImage, ...]:
        """Return a request's images with their keys; raises, and counts, what is impossible."""
        try:
            return placed_images(self._images, prompt_ids, images, entry, salt)
        except ValueError:
            self._metrics.rejected("invalid")
            raise

    def queue(self, request: Request, entry: AdapterEntry | None) -> None:
        """Hand a request to the loop; raises QueueFull, ValueError or EngineDead."""
        try:
            if request.grammar is None and request.sampling.structured_outputs is not None:
                grammar = self._grammars.of(request.sampling)
                request = dataclasses.replace(request, grammar=grammar)
            tokenizer = self._tokenizers.of(entry)
            if words := request.sampling.bad_words:
                tokens = self._bad_words.of(tokenizer, words)
                request = dataclasses.replace(request, bad_words=tokens)
            request.sampling.check_first(request.bad_words, self._end_ids)
            self._loop.submit(
                request,
                entry,
                lambda sequences: LiveRequest(request, sequences, tokenizer, self._metrics),
            )
            if entry is not None:
                self._registry.handed_in(entry)
            if request.tier:
                self._metrics.later(self._metrics.tiers.queued, request.tier)
        except QueueFull:
            self._metrics.rejected("queue_full")
            raise
        except ValueError:
            self._metrics.rejected("invalid")
            raise
        except RuntimeError:
            self._metrics.rejected("engine_dead")
            raise

    def _check_primary(
        self,
        adapter: Adapter,
        entry: AdapterEntry | None,
        named: Callable[[str], AdapterEntry],
    ) -> tuple[str | None, AdapterEntry | None]:
        """Return the name of the adapter that is in the weights, whose rows need no other."""
        if entry is None and adapter is not None:
            entry = self._compositions.resolve(adapter, named)
        if entry is None or entry.digest != self._primary:
            raise ValueError(
                "This engine has one adapter merged into its weights (merge_adapter), and serves "
                "it alone, as it was at the start."
            )
        return entry.name, None

    def _check_numbers(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        vocab = self._vocab_size
        sampling.check_vocab(vocab)
        if len(prompt_ids) and (min(prompt_ids) < 0 or max(prompt_ids) >= vocab):
            bad = next(token for token in prompt_ids if not 0 <= token < vocab)
            raise ValueError(f"prompt token id must be in [0, {vocab - 1}], got {bad}.")
        limit = self._max_logprobs
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(sampling, field) or 0) > limit:
                raise ValueError(f"{field} must be at most {limit} on this server.")
