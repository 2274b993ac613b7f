"""All ranks of a LoRA Server on one host: started, watched, started anew when one dies."""

import logging
import multiprocessing.connection
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving.lora_server.coordinator import Coordinator
from serving.lora_server.rank_process import RankProcess
from serving.lora_server.spec import ServerSpec

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # the watch looks at least so often whether it is to end
_RESTART_S = 1.0  # between two starts of the same rank


class ServerGroup:
    """A LoRA Server of `spec.ranks` processes with its coordinator."""

    def __init__(self, spec: ServerSpec, first_gpu: int = 0):
        """Start all ranks, on GPUs from `first_gpu` on, and wait until instances may connect.

        Raises ConnectionError when one of them ends instead; its own log says why.
        """
        self.spec, self._first_gpu = spec, first_gpu
        self._folder = Path(tempfile.mkdtemp(prefix="lora-server-"))
        self.paths = [str(self._folder / f"rank-{rank}") for rank in range(spec.ranks)]
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the processes, against `close`
        self._processes = [self._start(rank) for rank in range(spec.ranks)]
        self.coordinator = Coordinator([p.control for p in self._processes], spec.num_adapters)
        try:
            with ThreadPoolExecutor(spec.ranks) as pool:
                list(pool.map(_open, self._processes))
        except BaseException:
            self._end()
            raise
        self._watch = threading.Thread(target=self._run, name="lora-server-watch", daemon=True)
        self._watch.start()

    @property
    def processes(self) -> list[RankProcess]:
        """The ranks' processes as they are now."""
        with self._lock:
            return list(self._processes)

    def close(self) -> None:
        """End all ranks and remove what they left."""
        self._closing.set()
        for process in self.processes:
            if not process.is_ready:  # the watch waits for it
                process.kill()
        self._watch.join()
        self._end()

    def _start(self, rank: int) -> RankProcess:
        return RankProcess(self.spec, rank, self.paths[rank], self._first_gpu + rank)

    def _end(self) -> None:
        with self._lock:
            for process in self._processes:
                process.stop()
        self.coordinator.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        """Wait for a rank to end, and put a new process in its place."""
        while not self._closing.is_set():
            sentinels = {process.sentinel: process for process in self.processes}
            for ended in multiprocessing.connection.wait(list(sentinels), _LOOK_S):
                if not self._closing.is_set() and isinstance(ended, int):
                    self._replace(sentinels[ended])

    def _replace(self, dead: RankProcess) -> None:
        rank, begun = dead.rank, time.monotonic()
        logger.warning("Rank %d of the LoRA Server has ended; restarting it.", rank)
        self.coordinator.lose(rank)
        dead.stop()
        process = self._start(rank)
        with self._lock:
            self._processes[rank] = process
        try:
            process.wait_ready()
            self.coordinator.restore(rank, process.control)
            process.open()
        except (ConnectionError, ValueError, RuntimeError) as error:
            logger.error("Rank %d of the LoRA Server could not be restarted: %s", rank, error)
            process.kill()
            self._closing.wait(_RESTART_S)
            return
        logger.info("Rank %d was restarted in %.1f s.", rank, time.monotonic() - begun)


def _open(process: RankProcess) -> None:
    process.wait_ready()
    process.open()
