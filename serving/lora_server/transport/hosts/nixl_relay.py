"""The thread between a channel's slots of this process and those of the peer, over a NIXL agent."""

import ctypes
import dataclasses
import logging
import mmap
import select
import socket
import time
from typing import Any

from serving.lora_server.transport.header import HEADER_BYTES, Header, Kind, parse
from serving.lora_server.transport.library import calls
from serving.lora_server.transport.shapes import PAGE, Shapes
from serving.lora_server.transport.slots import Joined

log = logging.getLogger(__name__)

_RESPONSES = 128  # where the second counter of a channel lies: csrc/channel.h
_SLEEP_NANOS = 1_000_000  # of a wait for the own endpoint
_EAGER_S = 0.002  # so long after a message the next one is looked for without a pause
_PAUSE_S = 0.0001
_LOOKS = 64  # polls between two looks at the connection


@dataclasses.dataclass(frozen=True)
class Landing:
    """A slot in somebody's memory."""

    address: int
    num_bytes: int


class Relay:
    """One side of a channel. `agent` is a nixl.Agent that nobody else uses."""

    def __init__(self, shapes: Shapes, slots: Joined, agent: Any, *, beside_client: bool):
        self._shapes, self._agent, self._beside_client = shapes, agent, beside_client
        self._calls = calls()
        self._channel = mmap.mmap(slots.channel, shapes.channel_bytes)
        self._bell = mmap.mmap(slots.bell, PAGE)
        self._at, self._bell_at = _address(self._channel), _address(self._bell)
        requests = Landing(self._at + PAGE, shapes.request_slot)
        responses = Landing(requests.address + requests.num_bytes, shapes.response_slot)
        self.outgoing, self.landing = (
            (requests, responses) if beside_client else (responses, requests)
        )
        counters = (self._at, self._at + _RESPONSES)
        self._sent_at, self._landed_at = counters if beside_client else counters[::-1]
        memory = [(one.address, one.num_bytes, 0, "") for one in (requests, responses)]
        self._registered = agent.register_memory(memory, "DRAM")
        self._peer, self._theirs = "", Landing(0, 0)
        self._landed = 0  # the last message that came

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *exception: object) -> None:
        self._agent.deregister_memory(self._registered)
        self._channel.close()
        self._bell.close()

    def meet(self, peer: str, theirs: Landing) -> None:
        """Write messages to this agent's slot from now on."""
        self._peer, self._theirs = peer, theirs

    def run(self, connection: socket.socket) -> None:
        """Carry messages both ways until the connection ends or a transfer fails."""
        sent, last, polls = 0, time.monotonic(), 0
        while True:
            came = self._take_notifications()
            # Messages alternate: either the own endpoint is to write one now, or the peer is.
            own_turn = (self._landed == sent) == self._beside_client
            value = self._calls.wait(self._sent_at, sent, _SLEEP_NANOS if own_turn else 0)
            if value != sent:
                sent = value
                if not self._send(sent, connection):
                    return
            elif not came:
                polls += 1
                if (own_turn or polls % _LOOKS == 0) and _has_ended(connection):
                    return
                if not own_turn:
                    time.sleep(0 if time.monotonic() - last < _EAGER_S else _PAUSE_S)
                continue
            last = time.monotonic()

    def _take_notifications(self) -> bool:
        """Step the counters for what the peer has written; return whether there was any."""
        came = False
        for message in self._agent.get_new_notifs().get(self._peer, []):
            sequence = int.from_bytes(message[:8], "little")
            if sequence <= self._landed:
                continue
            self._landed, came = sequence, True
            self._calls.step(self._landed_at, sequence)
            if not self._beside_client:
                self._calls.ring(self._bell_at)
        return came

    def _send(self, sequence: int, connection: socket.socket) -> bool:
        """Write the message in the own slot to the peer's; return whether that went well."""
        start = self.outgoing.address - self._at
        header = parse(self._channel[start : start + HEADER_BYTES])
        if header is None or header.sequence != sequence:
            return False
        try:
            return self._write(self._pieces(header), sequence, connection)
        except Exception as error:  # those of NIXL have no class in common
            if not _has_ended(connection):
                log.warning("NIXL wrote no message to %s: %s", self._peer, error)
            return False

    def _write(
        self, pieces: list[tuple[int, int]], sequence: int, connection: socket.socket
    ) -> bool:
        """Write pieces of the own slot to the peer's, then tell it; return whether both went well.

        Raises what NIXL does, such as where the peer has taken its memory back.
        """
        local = [(self.outgoing.address + at, size, 0) for at, size in pieces]
        theirs = [(self._theirs.address + at, size, 0) for at, size in pieces]
        agent, message = self._agent, sequence.to_bytes(8, "little")
        descriptors = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(theirs, "DRAM")
        handle = agent.initialize_xfer("WRITE", *descriptors, self._peer, message)
        try:
            state = agent.transfer(handle)
            while state == "PROC" and not _has_ended(connection):
                time.sleep(0)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        return state == "DONE"

    def _pieces(self, header: Header) -> list[tuple[int, int]]:
        """Return (offset, bytes) of what a message consists of."""
        shapes, pieces = self._shapes, [(0, HEADER_BYTES)]
        if not 0 < header.rows <= shapes.max_rows:
            return pieces
        site = shapes.sites[header.site]
        if header.kind == Kind.REQUEST:
            row = site.d_in * shapes.row_dtype.itemsize
            ids = [(at, 4 * header.rows) for at in (shapes.adapters_offset, shapes.experts_offset)]
            return [*pieces, *ids, (shapes.rows_offset, row * header.rows)]
        places = zip(shapes.result_offsets(header.site), site.d_outs, strict=True)
        size = shapes.result_dtype.itemsize * header.rows
        return [*pieces, *((at, size * width) for at, width in places)]


def _address(memory: mmap.mmap) -> int:
    """Return where a mapping lies; nothing keeps it from being closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _has_ended(connection: socket.socket) -> bool:
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))  # nothing is said any more: what can be read is the end
