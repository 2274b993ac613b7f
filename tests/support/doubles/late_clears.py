"""Host memory whose clears come as late as they may, as a device's do."""

import numpy as np

from lora_jax.memory.host import HostMemory


class LateClears(HostMemory):
    """Pages that were begun to be cleared hold 0xff until somebody waits, or must."""

    def __init__(self):
        super().__init__("none")
        self.begun: list[tuple[int, int]] = []
        self.num_cleared = 0

    def begin_clear(self, address: int, num_bytes: int) -> None:
        super().write(address, np.full(num_bytes, 0xFF, np.uint8))
        self.begun.append((address, num_bytes))

    def finish_clears(self) -> None:
        for address, num_bytes in self.begun:
            self.clear(address, num_bytes)
        self.num_cleared += len(self.begun)
        self.begun = []

    def write(self, address: int, data: np.ndarray) -> None:
        self.finish_clears()
        super().write(address, data)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.finish_clears()
        super().unmap(address, num_bytes)
