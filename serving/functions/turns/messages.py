"""Messages between the keeper of turns and the functions that take them. No jax.

All processes of a host read one monotonic clock, so a time in a message means the same to both.
"""

import struct

# Of a function: it waits for the device; its turn is over; nothing of that turn runs any more.
ASK, BACK, ENDED = b"a", b"b", b"e"
# Of the keeper: a turn on an idle device, one behind the last step of the turn before, the end of
# that step, the asking back.
GRANT, FOLLOW, ALONE, RECALL = b"g", b"f", b"l", b"r"
ASK_FIELDS = struct.Struct("<c4d")  # with those of `table.Ask`
BACK_FIELDS = struct.Struct("<c?4d")  # whether its last step still runs, and `log.Stamps`
WORD = struct.Struct("<cd")  # with the keeper's time
LONGEST = 64  # bytes of a message, and room for one that is none of these


def word(letter: bytes, now: float = 0.0) -> bytes:
    """Return a message of the keeper."""
    return WORD.pack(letter, now)
