"""Process of all adapters of an engine for `isolation=server` on GPUs, on a device of its own.

It is a LoRA Server of one rank: no backbone, no KV pages, no prompt and no engine. It sees the
hidden states of the rows of all adapters.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.memory.wire import ShareError, receive_header, send_header
from serving.functions.messages import error_fields
from serving.lora_server.plain_adapter import read_plain
from serving.lora_server.rank import RankSizes, ServerRank
from serving.lora_server.server import RankServer
from serving.lora_server.transport import selection
from serving.lora_server.whole_layout import WholeLayout
from serving.runtime.device_copier import device_copier
from serving.runtime.gpu_assignment import use_gpu

_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
logger = logging.getLogger(__name__)

_REFUSALS = (
    *(ValueError, KeyError, TypeError, OSError, NotImplementedError),
    jax.errors.JaxRuntimeError,
)


class Adapters:
    """The rank and its adapters; one thread uses it."""

    def __init__(self, order: dict[str, Any]):
        """Compile everything, and listen at the order's address. Raises as the device does."""
        self._layout = layout = WholeLayout(order["model"])
        self._model, self._max_rank = order["model"], order["max_rank"]
        sizes = RankSizes(
            order["max_tenants"], order["max_rank"], order["max_rows"], layerwise=False
        )
        dtype = jnp.dtype(order["dtype"])
        rank = ServerRank(layout.catalogue, layout.shard, sizes, dtype, copier=device_copier())
        rank.warm_up()
        terms = layout.terms(order["max_rows"], order["dtype"], order["max_tenants"])
        open_server = lambda: selection.open_server(order["address"], terms, 0)  # noqa: E731
        self.server = RankServer(rank, layout.layers, layout.catalogue, open_server)
        threading.Thread(target=self._run, name="adapters", daemon=True).start()
        self.server.open()

    def load(self, number: int, name: str, folder: str) -> dict[str, Any]:
        """Hold the adapter in a folder under a number; return its report.

        Raises ValueError for one that cannot be served so.
        """
        config, catalogue = self._layout.config, self._layout.catalogue
        weights = read_plain(name, folder, self._model, config, catalogue, self._max_rank)
        self._layout.check(name, weights.report.modules)
        self.server.hold(number, weights)
        return weights.report.as_json()

    def unload(self, number: int) -> None:
        """Hold nothing under a number."""
        self.server.unload(number, 0)

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException:
            logger.exception("The process of all adapters has failed.")
            os._exit(1)


def _take_gpu(number: int) -> None:
    """Compute on a GPU with XLA's own allocator, which functions that share one leave."""
    use_gpu(number)
    if os.environ.get(_ALLOCATOR) == "cuda_async":
        del os.environ[_ALLOCATOR]


def run(connection: Any, order: dict[str, Any], private_bytes: Callable[[], int]) -> None:
    """Answer an engine's rows, and the agent's calls, until the connection's other side has gone.

    `order` says model, address and the engine's sizes, and which GPU is this process's.
    """
    start = time.monotonic()
    try:
        if order["device"] != "cpu":
            _take_gpu(order["gpu"])
        adapters = Adapters(order)
    except _REFUSALS as error:
        text = f"The process of all adapters cannot start: {error}"
        of_device = isinstance(error, jax.errors.JaxRuntimeError)  # such as memory of others yet
        send_header(connection, {"error": text} | ({"retryable": True} if of_device else {}))
        return
    about = {"start_s": time.monotonic() - start, "private_bytes": private_bytes()}
    send_header(connection, {"ready": True, **about, "device": str(jax.local_devices()[0])})
    calls = {"load": adapters.load, "unload": adapters.unload}
    try:
        while True:
            call = receive_header(connection)
            given = {name: value for name, value in call.items() if name not in ("id", "call")}
            try:
                answer = {"value": calls[call["call"]](**given)}
            except Exception as error:  # of this adapter: others are served on
                answer = error_fields(error)
            send_header(connection, {"id": call["id"], **answer})
    except (ShareError, OSError):
        adapters.server.stop()
