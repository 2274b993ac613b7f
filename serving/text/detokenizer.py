"""Turns the tokens of one choice into text as they come, and finds stop strings in it. No jax."""

from collections.abc import Sequence

from serving.api.sampling import Sampling
from serving.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one choice: all that `push` and `finish` return, put together, is its whole text.

    Text is handed out when it can no longer change: a character when its bytes are complete, and
    what may be the beginning of a stop string when it turned out not to be. Stop strings may lie
    across any number of tokens; where they are found does not depend on the borders of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: Sampling):
        """The prompt decides whether the text begins a line of its own or continues it."""
        self._stream = tokenizer.stream(
            prompt_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = sampling.stop
        self._includes_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._done = False

    def push(self, token: int) -> tuple[str, str | None]:
        """Return the text that is settled with this token, and the stop string that was met.

        The text then ends before the stop string (or with it, when it is to be included), and
        nothing may follow. Before min_tokens no stop string counts.
        """
        if self._done:
            raise ValueError("The text has ended.")
        if not self._stops:  # then nothing is held back but bytes, by the stream
            return self._stream.feed(token), None
        self._num_tokens += 1
        self._held += self._stream.feed(token)
        if self._num_tokens < self._min_tokens:
            return self._release(len(self._held)), None
        first = self._first_stop()
        if first is None:
            return self._release(len(self._held) - self._possible_stop()), None
        start, stop = first
        self._done = True
        return self._release(start + len(stop) * self._includes_stop), stop

    def finish(self) -> str:
        """Return the text still held back, since no more tokens will come."""
        if self._done:
            return ""
        self._done = True
        self._held += self._stream.close()
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _first_stop(self) -> tuple[int, str] | None:
        """The stop string that is complete first, and where it starts."""
        matches = [(self._held.find(stop), stop) for stop in self._stops]
        complete = [match for match in matches if match[0] >= 0]
        return min(complete, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
