"""h11's connection, which frames the pieces of a chunked answer itself.

For each piece h11 looks through its states and makes a list, which takes longer than to encode a
token's event. The state does not change between pieces, and their frame is a length and two breaks.
"""

from typing import Any

import h11


def chunk(data: bytes) -> bytes:
    """Return a piece of a chunked answer, which is not empty, as it goes over the wire."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class QuickConnection(h11.Connection):
    """A server's connection; it sends what h11's does."""

    _is_chunked = False  # whether the answer that is being sent is

    @property
    def is_in_chunks(self) -> bool:
        """True if an answer is being sent whose pieces are what `chunk` returns."""
        return self._is_chunked and self.our_state is h11.SEND_BODY

    def send(self, event: Any) -> bytes | None:
        """Return the bytes of an event; raises as h11's does."""
        if type(event) is h11.Data and self.is_in_chunks:
            return chunk(event.data) if event.data else b""
        self._is_chunked = False
        sent = super().send(event)
        if type(event) is h11.Response and sent is not None:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent
