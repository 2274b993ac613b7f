"""Functions in two lines, and as a decorator around a handler. No jax.

fn = lora_jax.function("path/to/adapter")
print(fn.generate("The court")[0].outputs[0].text)

A handler is ordinary code: it runs in the caller's process, which holds no weights and no device.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.head_format import HEAD_FILE
from serving.functions.agent import connect
from serving.functions.handle import Function

_Path = str | os.PathLike[str]


def function(
    adapter: _Path, *, model: _Path | None = None, name: str | None = None, **fields: Any
) -> Function:
    """Return the function of an adapter folder, over a backbone that this process loads once.

    Without `model` the base model is the folder that adapter_config.json names: that path, or a
    folder of its name in the current folder or a parent of the adapter's. `fields` are those of
    `EngineConfig`. Raises ValueError if there is no such folder, and what `connect` raises.
    """
    return connect(base_of(adapter) if model is None else model, adapter, name=name, **fields)


def base_of(adapter: _Path) -> Path:
    """Return the folder of the base model that the adapter's config names. Raises ValueError."""
    folder = Path(adapter).resolve()
    try:
        files = AdapterFolder(folder)
        names = files.files()
        if peft_format.CONFIG_FILE not in names:
            raise ValueError(f"{folder} is no adapter: it has no {peft_format.CONFIG_FILE}.")
        config = peft_format.read_config(files, has_head=HEAD_FILE in names)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no adapter: {error}") from None
    if not config.base_model:
        raise ValueError(f"{folder} names no base model: give model= with its folder.")
    # The config as others may see it has the last part alone of a path on this machine.
    named = json.loads((folder / peft_format.CONFIG_FILE).read_bytes())["base_model_name_or_path"]
    around = (parent / Path(named).name for parent in (Path.cwd(), *folder.parents))
    for candidate in (Path(named).absolute(), *around):
        if (candidate / "config.json").is_file():
            return candidate
    raise ValueError(
        f"{folder} is for the base model {named!r}, and neither that path nor a folder of its "
        "name near the adapter exists: give model= with its folder."
    )


class App:
    """Handlers with functions of one base model.

    app = App("path/to/model")

    @app.function("path/to/adapter")
    def brief(event, model):
        return model.generate(event["text"])
    """

    def __init__(self, model: _Path, **fields: Any):
        """Nothing is loaded before the first call; `fields` are those of `EngineConfig`."""
        self.model, self._fields = Path(model).resolve(), fields

    def function[Event, Answer](
        self, adapter: _Path | None = None, *, name: str | None = None
    ) -> Callable[[Callable[[Event, Function], Answer]], Callable[[Event], Answer]]:
        """Return a decorator of a handler(event, model); the decorated handler takes the event
        only.

        `model` is the adapter's function; an adapter of None is the base model. The first call
        starts the function's process. Raises TypeError for a handler without the parentheses.
        """
        if callable(adapter):
            raise TypeError(
                '@app.function takes an adapter: write @app.function("path/to/adapter"), or '
                "@app.function() for the base model."
            )

        def decorate(handler: Callable[[Event, Function], Answer]) -> Callable[[Event], Answer]:
            @functools.wraps(handler)
            def answer(event: Event) -> Answer:
                return handler(event, connect(self.model, adapter, name=name, **self._fields))

            return answer

        return decorate
