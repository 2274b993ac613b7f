"""What the HTTP server needs of an engine, and nothing more."""

from collections.abc import Callable
from typing import Any, Protocol

from lora_jax.adapters.registry import AdapterEntry, AdapterRegistry
from serving.request import OutputDelta, Share
from serving.sampling import Sampling


class AbstractTokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_strs(self, ids: list[int]) -> list[str]: ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str: ...


class AbstractEngine(Protocol):
    """An engine that requests can be handed to from any thread."""

    tokenizer: Any
    registry: AdapterRegistry
    config: Any
    model_info: Any
    metrics: Any

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
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...

    def is_alive(self) -> bool: ...

    def stats(self) -> Any: ...
