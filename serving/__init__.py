"""Serving many adapters over one base model: `from serving import Engine, Sampling`.

Names are imported when they are first used, so that the parts that need no jax do without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.api.outputs import BadRequest, Completion, RequestFailed, RequestOutput
    from serving.api.request import EngineDead, FinishReason, OutputDelta, QueueFull, TokenLogprobs
    from serving.api.sampling import Sampling
    from serving.api.structured_outputs import StructuredOutputs
    from serving.engine.adapter_info import AdapterInfo
    from serving.engine.async_engine import AsyncEngine
    from serving.engine.engine import Engine

__all__ = [
    "AdapterInfo",
    "AsyncEngine",
    "BadRequest",
    "Completion",
    "Engine",
    "EngineDead",
    "FinishReason",
    "OutputDelta",
    "QueueFull",
    "RequestFailed",
    "RequestOutput",
    "Sampling",
    "StructuredOutputs",
    "TokenLogprobs",
]

_HOMES = {
    "AdapterInfo": "engine.adapter_info",
    "AsyncEngine": "engine.async_engine",
    "BadRequest": "api.outputs",
    "Engine": "engine.engine",
    "EngineDead": "api.request",
    "Completion": "api.outputs",
    "RequestFailed": "api.outputs",
    "RequestOutput": "api.outputs",
    "FinishReason": "api.request",
    "OutputDelta": "api.request",
    "QueueFull": "api.request",
    "TokenLogprobs": "api.request",
    "Sampling": "api.sampling",
    "StructuredOutputs": "api.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'serving' has no attribute {name!r}")
    return getattr(importlib.import_module(f"serving.{_HOMES[name]}"), name)
