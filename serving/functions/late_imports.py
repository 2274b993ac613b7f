"""Imports of a start that go on beside it, and what none of them needs.

A zygote that has just been made forks before it has imported the engine. The function then imports
it on a thread, while the driver makes its context and maps the backbone outside of Python's lock.
"""

import contextlib
import importlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

# What flax shows trees and trains with: a tenth of the time of a function's imports.
_LATER = "optax", "treescope", "rich", "rich.console", "rich.table", "rich.text"
# flax asks whether this is a notebook, jax whether etils reads its files from elsewhere.
_NOT_NEEDED = "IPython", "etils.epath"


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import what functions need of jax and flax, without what they only use elsewhere.

    jax also reads the metadata of all packages in search of ROCm's plugin, which no backend here
    runs on. A cache folder of programs that is no local one keeps etils. Modules that are only used
    by calls that functions never make are imported by the first such call.
    """
    far = any("://" in v for n, v in os.environ.items() if n.startswith("JAX_"))
    names = [n for n in _NOT_NEEDED if n not in sys.modules and not (far and n.startswith("etils"))]
    distributions = importlib.metadata.distributions
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(names))  # an import raises ImportError
    later = [name for name in _LATER if "flax" not in sys.modules and name not in sys.modules]
    modules.update({name: _LaterModule(name) for name in later})
    if "jax" not in sys.modules:
        importlib.metadata.distributions = lambda **given: iter(())
    try:
        yield
    finally:
        importlib.metadata.distributions = distributions
        for name in (*names, *later):
            sys.modules.pop(name, None)


class _LaterModule(ModuleType):
    """A module in the place of one that is imported when anything of it is used."""

    def __getattr__(self, name: str) -> "_Later":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


class _Later:
    """Something of a module by its name, which types of arguments may have, too."""

    def __init__(self, owner: str, name: str):
        self._owner, self._name = owner, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(sys.modules.get(self._owner.partition(".")[0]), _LaterModule):
            return _Later(f"{self._owner}.{self._name}", name)
        return getattr(self._get(), name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._get()(*given, **named)

    def __or__(self, other: Any) -> "_Later":
        return self

    __ror__ = __or__

    def _get(self) -> Any:
        """Import the module and return what this stands for."""
        module, *rest = self._owner.split(".")
        found: Any = importlib.import_module(module)
        for part in (*rest, self._name):
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
        return found


class LateImports:
    """Modules that one thread imports in their order, as far as they are not there yet."""

    def __init__(self, names: Iterable[str]):
        """Begin. The thread is none where nothing is missing, and else ends behind the last one."""
        self._found: dict[str, Future[ModuleType]] = {
            name: Future() for name in names if name not in sys.modules
        }
        if self._found:
            threading.Thread(target=self._import, name="imports", daemon=True).start()

    def get(self, name: str) -> ModuleType:
        """Return a module; waits for its import, and raises what that raises."""
        found = self._found.get(name)
        return importlib.import_module(name) if found is None else found.result()

    def _import(self) -> None:
        with lean():
            for name, found in self._found.items():
                try:
                    found.set_result(importlib.import_module(name))
                except BaseException as error:  # it is raised where the module is needed
                    found.set_exception(error)
