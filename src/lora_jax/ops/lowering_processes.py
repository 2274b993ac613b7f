"""Processes that lower kernels side by side; each thread of a pool has one."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax
from jax.export import Exported

from lora_jax.ops.lowering import KernelOrder, pack_order, receive, send

_MODULE = "lora_jax.ops.lowering"


class LoweringProcesses:
    """Up to `count` processes, of which one starts where no other is free; none uses a device."""

    def __init__(self, count: int):
        self.count, self._wide = count, bool(jax.config.jax_enable_x64)
        self._pool = ThreadPoolExecutor(max(1, count), thread_name_prefix="lowering")
        self._asked: list[Future[Exported]] = []
        self._lock, self._ended = threading.Lock(), False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._of_thread = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def lower(self, order: KernelOrder) -> Future[Exported]:
        """Return the kernel's code to come; it raises where the process fails."""
        self._asked.append(self._pool.submit(self._ask, order))
        return self._asked[-1]

    @property
    def num_asked(self) -> int:
        """Kernels that were asked for."""
        return len(self._asked)

    def has_answered(self, count: int) -> bool:
        """Return whether the first `count` kernels asked for are there, or have failed."""
        return all(asked.done() for asked in self._asked[:count])

    def close(self) -> None:
        """End all processes, those at work too."""
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            with process:  # closes its pipes, and waits for its end
                pass

    def _ask(self, order: KernelOrder) -> Exported:
        packed, process = pack_order(order), self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = None
        with contextlib.suppress(BrokenPipeError):
            send(process.stdin, packed)
            answer = receive(process.stdout)
        if answer is None:
            raise RuntimeError(f"the process has ended with status {process.wait()}")
        code = pickle.loads(answer)
        if isinstance(code, str):
            raise RuntimeError(code)
        return code

    def _process(self) -> subprocess.Popen[bytes]:
        """Return the process of this thread."""
        process = getattr(self._of_thread, "process", None)
        if process is not None and process.poll() is None:
            return process
        with self._lock:
            if self._ended:
                raise RuntimeError("no process starts any more")
            process = self._of_thread.process = _started(self._wide)
            self._processes.append(process)
        return process


def _started(wide: bool) -> subprocess.Popen[bytes]:
    """Start a process that imports what this one does, and sees no GPU; Ctrl-C is not for it.

    `wide`: with 64 bits by default, which a program may have set itself.
    """
    settings = {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_ENABLE_X64": str(wide),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **settings},
        process_group=0,
    )
