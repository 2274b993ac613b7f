"""Starts of functions that only read programs, which a process without an adapter makes. No jax."""

import json
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from serving.functions.jail import GPU_JAIL

# Fields of an engine whose value, where none is given, is what the function's adapter needs.
SIZES = (
    "max_lora_cls_labels",
    "enable_dora_and_bias",
    "max_lora_trainable_tokens",
    "max_lora_modules_to_save",
)
# Bytes of a GPU beside what was measured, of the first and later processes of an adapter that ran
# out of them; None: no bound. With the second one no start on an H200 has run out.
EXTRA_BYTES = 0, 22 << 20, 64 << 20, 512 << 20, None
Launched = tuple[socket.socket, int, dict[str, Any]]


class ProgramMaker:
    """Has programs made that functions lack; any thread may call it."""

    def __init__(self, launch: Callable[..., Launched], end: Callable[[socket.socket], None]):
        """`launch` is an agent's for an order; `end` closes a connection when its process ended."""
        self._launch, self._end = launch, end
        self._making = threading.Lock()
        self._made: dict[str, float] = {}  # sizes: when their programs were made last
        self._settled: set[str | None] = set()  # folders of adapters whose programs were asked for
        self._lacks: dict[str | None, int] = {}  # folders of adapters: how often memory ran out
        self._least = 0  # such times that count for all: 1, once memory ran out for any

    def start(self, order: dict[str, Any], fields: dict[str, Any], *, compiles: bool) -> Launched:
        """Launch a function, which reads its programs; where they are not kept, a process without
        an adapter makes them first, so that nothing of a tenant can change what others load.

        That process has the sizes that the function says its adapter needs. ValueError where
        programs are not kept then, unless functions compile: in the jail of a GPU they do not.
        """
        demands = not compiles or order["adapter"] not in self._settled
        asked_at = time.monotonic()
        launched = self._launch_bounded(order, demands=demands)
        self._settled.add(order["adapter"])
        if launched[2]["ready"]:
            return launched
        self._end(launched[0])
        self._make(fields, _sizes_of(launched[2]), asked_at)
        launched = self._launch_bounded(order, demands=not compiles)
        if launched[2]["ready"]:
            return launched
        self._end(launched[0])
        raise ValueError(
            f"Function {order['name']!r} cannot start: it lacks a program, and in the jail of a "
            f"GPU nothing compiles ({launched[2].get('missing', 'no reason given')}). A process "
            "without an adapter did not keep it: see that the folder of LORA_JAX_CACHE can be "
            f"written and that JAX_ENABLE_COMPILATION_CACHE is not 0, or set {GPU_JAIL}=0, with "
            "which functions compile and have no jail."
        )

    def _launch_bounded(self, order: dict[str, Any], *, demands: bool) -> Launched:
        """Launch a function in the device memory that was measured, or in more where that did not
        do before.
        """
        adapter, programs = order["adapter"], _reads(demands)
        while True:
            extra = EXTRA_BYTES[self._level(adapter)]
            launched = self._launch(order | {"extra_bytes": extra}, programs=programs)
            if extra is None or not launched[2].get("lacks_memory"):
                return launched
            self._end(launched[0])
            self.lacked(adapter)

    def lacked(self, adapter: str | None) -> None:
        """A process of this adapter's folder ran out of its memory: the next one has more.

        Others begin with the first step more: what was measured may be too little for all.
        """
        self._lacks[adapter] = min(self._level(adapter) + 1, len(EXTRA_BYTES) - 1)
        self._least = 1

    def _level(self, adapter: str | None) -> int:
        return max(self._least, self._lacks.get(adapter, 0))

    def _make(self, fields: dict[str, Any], sizes: dict[str, int], asked_at: float) -> None:
        """Have programs of these sizes made, in the room of a function that has no process.

        Those made since the function asked are there. Older ones may have made room for others.
        """
        kind = json.dumps(sizes, sort_keys=True)
        with self._making:
            if self._made.get(kind, -math.inf) > asked_at:
                return
            order = {"name": "programs", "adapter": None, "http": None, "fields": fields | sizes}
            self._end(self._launch(order, programs={"writes": True})[0])
            self._made[kind] = time.monotonic()


def _reads(demands: bool) -> dict[str, bool]:
    return {"writes": False, "demands": demands}


def _sizes_of(answer: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that a function says its adapter needs; an engine checks their bounds."""
    given = answer.get("sizes")
    given = given if isinstance(given, dict) else {}
    return {name: given[name] for name in SIZES if isinstance(given.get(name), int)}
