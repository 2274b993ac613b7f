"""Slots and counters of one client and one server, mapped from two GPUs' memory."""

import threading

from cuda_backend.peer_memory import Landing

PAGE = 4096  # a counter's page, in front of a slot


class Channel:
    """The slots and counters between a client and a server, as this process has mapped them.

    Pushing, a message lies in its receiver's memory; pulling, in its sender's. Counters are always
    the receiver's.
    """

    def __init__(self, beside_server: Landing, beside_client: Landing, pull: bool):
        self._landings, self._holders = (beside_server, beside_client), 1
        self.request_counter, self.response_counter = beside_server.address, beside_client.address
        slots = beside_server.address + PAGE, beside_client.address + PAGE
        self.request_slot, self.response_slot = slots[::-1] if pull else slots
        self._lock = threading.Lock()

    def share(self) -> "Channel":
        """Return this channel, to be closed once more: the other end is in this process."""
        with self._lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """Unmap it when everybody has closed it; no kernel may be able to touch it then."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        for landing in self._landings:
            landing.close()
