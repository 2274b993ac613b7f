"""Serving many adapters over one base model: `from serving import Engine, Sampling`.

Names are imported when they are first used, so that the parts that need no jax do without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.engine import AdapterInfo, Engine
    from serving.outputs import Completion, RequestFailed, RequestOutput
    from serving.request import EngineDead, FinishReason, OutputDelta, QueueFull, TokenLogprobs
    from serving.sampling import Sampling

__all__ = [
    "AdapterInfo",
    "Completion",
    "Engine",
    "EngineDead",
    "FinishReason",
    "OutputDelta",
    "QueueFull",
    "RequestFailed",
    "RequestOutput",
    "Sampling",
    "TokenLogprobs",
]

_HOMES = {
    "AdapterInfo": "engine",
    "Engine": "engine",
    "EngineDead": "request",
    "Completion": "outputs",
    "RequestFailed": "outputs",
    "RequestOutput": "outputs",
    "FinishReason": "request",
    "OutputDelta": "request",
    "QueueFull": "request",
    "TokenLogprobs": "request",
    "Sampling": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'serving' has no attribute {name!r}")
    return getattr(importlib.import_module(f"serving.{_HOMES[name]}"), name)
