"""Device memory of a function's process, which XLA takes at its start.

The process that makes programs measures what one of its kind needs, and keeps it beside them. On an
H200 turns of two functions of Llama-2-7B's shape kept 0.997 of a lone one's rate with XLA's
allocator under such a bound, and 0.859 with `cuda_async`, which has none (bench.functions).
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from lora_jax.memory.virtual import AbstractVirtualMemory
from serving.runtime import xla_memory
from serving.runtime.code_files import code_digest
from serving.runtime.program_cache import step_files
from serving.runtime.program_files import ProgramFiles
from serving.steps.kept_steps import NotKept, compiled_programs

logger = logging.getLogger(__name__)


class DeviceShare:
    """Device memory that processes of one kind need, measured by the one that makes programs."""

    def __init__(
        self,
        files: ProgramFiles,
        order: dict[str, Any],
        sizes: dict[str, int],
        memory: AbstractVirtualMemory,
    ):
        """`order` names model and fields, and bytes to take beside what was measured; `sizes` are
        what an adapter adds to these.
        """
        self._extra_bytes: int = order.get("extra_bytes", 0)
        usage = memory.usage()
        self._files = files
        self._device_bytes = (usage.device_used or 0) + (usage.device_free or 0)
        config = (Path(order["model"]) / "config.json").read_text()
        parts = [code_digest(), config, order["fields"] | sizes, self._device_bytes]
        self._key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def take(self) -> None:
        """Bound XLA's memory, where it is known. NotKept: it has not been measured yet."""
        known = self._files.get(self._key)
        if known is None:
            if self._files.demands:
                raise NotKept("what its arrays take of the device is not known")
            return
        num_bytes = int(known) and int(known) + self._extra_bytes
        if num_bytes and not xla_memory.bound(num_bytes, self._device_bytes):
            logger.warning("XLA's memory has no bound: steps after a pause take longer.")

    def keep(self) -> None:
        """Keep what this process, whose engine is there, needs."""
        num_bytes = xla_memory.needed_bytes(compiled_programs()) or 0
        logger.info("A function needs %.1f MB of XLA's memory.", num_bytes / 1e6)
        self._files.put(self._key, str(num_bytes).encode())


def share_of(
    order: dict[str, Any], sizes: dict[str, int], memory: AbstractVirtualMemory
) -> DeviceShare | None:
    """Return the share of a process with this order; None: XLA takes what it needs when it does.

    So it is on a CPU, where no programs are kept, where KV pages have no size of their own, and
    where the user named an allocator.
    """
    files = step_files()
    sized = order["fields"].get("kv_cache_memory_bytes")
    if order.get("device") != "gpu" or files is None or not sized:
        return None
    if order.get("extra_bytes", 0) is None:  # it ran out of every bound
        return None
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "cuda_async":  # as an agent starts them
        return None
    return DeviceShare(files[0], order, sizes, memory)
