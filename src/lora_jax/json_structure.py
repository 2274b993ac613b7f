"""The number of values in a JSON text, counted without reading the values. No jax.

A JSON reader holds the interpreter lock and makes an object per value. So the values are counted
first, by numpy, which releases the lock.
"""

import numpy as np

_CHUNK = 1 << 18  # bytes looked at together
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def too_many_values(data: bytes | bytearray | memoryview, most: int) -> bool:
    """Return whether a JSON text has more than `most` values; of other texts anything.

    Counted are commas, colons and opening brackets outside of strings: a key counts, too.
    """
    if len(data) < most:  # every value takes a byte
        return False
    count, inside, escaping = 1, False, False
    for start in range(0, len(data), _CHUNK):
        chunk = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        in_chunk, inside, escaping = _scan(chunk, inside, escaping)
        count += in_chunk
        if count > most:
            return True
    return False


def _scan(chunk: np.ndarray, inside: bool, escaping: bool) -> tuple[int, bool, bool]:
    """Return the values that begin in a chunk, and whether a string and an escape are open after.

    `inside` and `escaping` say so of the text before it.
    """
    quotes = chunk == _QUOTE
    slashes = np.flatnonzero(chunk == _BACKSLASH)
    after = False
    if len(slashes) or escaping:
        escaped, after = _escaped(slashes, len(chunk), escaping)
        quotes[escaped] = False
    strings = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ np.uint8(inside)
    marks = (chunk == ord(",")) | (chunk == ord(":")) | (chunk == ord("[")) | (chunk == ord("{"))
    count = int(np.count_nonzero(marks & (strings == 0)))
    return count, bool(strings[-1]), after


def _escaped(slashes: np.ndarray, size: int, escaping: bool) -> tuple[np.ndarray, bool]:
    """Return the places that a backslash escapes, and whether the last one escapes what follows.

    In a run of backslashes every second one is escaped, so that the place after a run is escaped
    when the run's length is odd.
    """
    places = np.concatenate([[-1], slashes]) if escaping else slashes
    begins = np.flatnonzero(np.diff(places, prepend=-9) != 1)
    lengths = np.diff(begins, append=len(places))
    ends = places[begins + lengths - 1] + 1
    odd = ends[lengths % 2 == 1]
    return odd[odd < size], bool(len(odd) and odd[-1] == size)
