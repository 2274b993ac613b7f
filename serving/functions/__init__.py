"""Isolated functions over one shared backbone (ServerlessLoRA, arXiv 2505.14468).

from serving import functions

law = functions.connect("path/to/model", adapter="path/to/adapter")
print(law.generate("The court")[0].outputs[0].text)

Names are imported when they are first used: the agent, which this process is, needs no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.functions.agent import Agent, connect
    from serving.functions.app import App
    from serving.functions.handle import DeviceFull, Function, FunctionDied, FunctionRefused

__all__ = ["Agent", "App", "DeviceFull", "Function", "FunctionDied", "FunctionRefused", "connect"]

_HANDLE = dict.fromkeys(("DeviceFull", "Function", "FunctionDied", "FunctionRefused"), "handle")
_HOMES = {"Agent": "agent", "connect": "agent", "App": "app"} | _HANDLE


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'serving.functions' has no attribute {name!r}")
    return getattr(importlib.import_module(f"serving.functions.{_HOMES[name]}"), name)
