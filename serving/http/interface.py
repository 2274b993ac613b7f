"""Interface of the HTTP server to an engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lora_jax.adapters.registry import AdapterEntry, AdapterRegistry
from serving.adapters.rollouts import Rollouts
from serving.api.images import PlacedImages
from serving.api.request import OutputDelta, Share, TraceContext
from serving.api.sampling import Sampling
from serving.text.structured.grammars import Grammar, Grammars


class AbstractTokenizer(Protocol):
    """Text to token ids and back."""

    longest_token: int  # characters of a text that one token may stand for

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    @property
    def has_chat_template(self) -> bool: ...

    def token_strs(self, ids: list[int]) -> list[str]: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...


class AbstractEngine(Protocol):
    """An engine that requests can be handed to from any thread."""

    tokenizer: Any
    registry: AdapterRegistry
    rollouts: Rollouts
    config: Any
    model_info: Any
    metrics: Any
    grammars: Grammars
    images: Any  # an ImageFront, None where the model takes text only

    def tokenizer_of(self, adapter: AdapterEntry | None) -> Any: ...

    def submit(
        self,
        prompt_ids: list[int],
        adapter: str | None,
        sampling: Sampling,
        *,
        on_output: Callable[[OutputDelta], None],
        cache_salt: str = "",
        share: Share | None = None,
        entry: AdapterEntry | None = None,
        images: PlacedImages = (),
        grammar: Grammar | None = None,
        by_head: bool = False,
        trace: TraceContext | None = None,
    ) -> str: ...

    def compose(self, parts: Sequence[tuple[AdapterEntry, float]]) -> AdapterEntry: ...

    def abort(self, request_id: str) -> None: ...

    def is_alive(self) -> bool: ...

    def stats(self) -> Any: ...
