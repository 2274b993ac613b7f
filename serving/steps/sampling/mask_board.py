"""Token masks that the host writes while the step that takes them runs.

A program that is bound by masks goes to the device with all others, one step ahead. Late in it, it
waits until the host has posted the masks, and reads them in the host's memory. So neither is the
device idle while masks are made, nor has the host a second program to send.
"""

import logging
import os
import threading

import jax

from lora_jax.ops import dispatch
from lora_jax.ops.cpu.host_board import HostBoard
from lora_jax.ops.host_board import AbstractHostBoard
from lora_jax.typing import Array, Float, Int, UInt32
from serving.steps.device_users import USERS, DeviceUsers
from serving.steps.sampling.token_masks import HostMasks, TokenMasks, num_words, unpack_masks
from serving.steps.step import StepSizes

logger = logging.getLogger(__name__)

_MOST = 2**31 - 1
_DEBUG = "jax_debug_nans", "jax_debug_infs"


class MaskBoard:
    """Masks of the one step that reads some; the runner's thread uses all but `post`.

    A step whose masks do not come in time masks no row, and `was_late` says so.
    """

    def __init__(
        self,
        board: AbstractHostBoard,
        sizes: StepSizes,
        vocab_size: int,
        users: DeviceUsers = USERS,
        most_waits: int = 0,
    ):
        """`users` are those of the devices, of which the engine is one.

        Beside others at most `most_waits` steps wait, those of other engines included.
        """
        self._board, self._sizes, self._vocab_size = board, sizes, vocab_size
        self._users, self._most_waits = users, most_waits
        self._waiting = set[int]()  # numbers of steps
        self._number = 0  # of the newest step that reads the board
        self._posting, self._has_ended = threading.Lock(), False
        self._late_calls: list[str] = []  # settings that a log line has named
        self.address = board.address

    def take_number(self) -> int:
        """Return the number of a step that is about to go out."""
        self._number = self._number % _MOST + 1
        return self._number

    def begin_wait(self, number: int) -> bool:
        """Return whether the step of this number may go out before its masks are posted.

        Then they must be posted next.
        """
        late_calls = _late_calls()
        if late_calls != self._late_calls:  # since the engine's start, or since the last step
            self._late_calls = late_calls
            if late_calls:
                logger.warning("Masks are made before their steps: %s", _why_late(late_calls))
        if late_calls:
            return False
        may = self._users.begin_wait(self._most_waits)
        if may:
            with self._posting:
                self._waiting.add(number)
        return may

    def new_masks(self) -> HostMasks:
        """Return the newest step's masks to write, when the step before has ended."""
        sizes = self._sizes
        values = self._board.values
        return HostMasks(sizes.num_masks, sizes.max_logit_rows, self._vocab_size, values)

    def post(self, number: int) -> None:
        """Let the step of this number go on; any thread may, while newer ones take theirs."""
        with self._posting:
            if not self._has_ended:
                self._board.post(number)
            self._end_waits({number})

    def give_up(self) -> None:
        """Let every step go on whatever its masks are: nobody will read what comes of it."""
        with self._posting:
            self._has_ended = True
            self._board.end()
            self._end_waits(set(self._waiting))

    def _end_waits(self, numbers: set[int]) -> None:
        ended = self._waiting & numbers
        self._waiting -= ended
        for _ in ended:
            self._users.end_wait()

    def was_late(self, number: int) -> bool:
        """Return whether a step that has ended, of this number, ran without its masks; 0: none."""
        return number > 0 and self._board.was_late(number)

    def read(
        self,
        address: UInt32[Array, "2"],
        number: Int[Array, "1"],
        logits: Float[Array, "rows vocab"],
    ) -> TokenMasks:
        """Return the masks of a step's number on the device, after its logits."""
        packed = self._board.read(address, number, logits)
        return unpack_masks(packed, self._sizes.num_masks, self._vocab_size)


def make_board(sizes: StepSizes, vocab_size: int) -> MaskBoard | None:
    """Return a board for steps on the default device; None where programs cannot wait for one.

    On a CPU or a GPU the log says why not.
    """
    make = _BOARDS.get(backend := jax.default_backend())
    if make is None:
        return None
    count = sizes.num_masks * num_words(vocab_size) + sizes.max_logit_rows
    try:
        _check_calls(backend)
        board = make(count)
    except NotImplementedError as error:  # Declined too
        logger.info("Steps with token masks are two programs: %s", error)
        return None
    # A step that waits may keep two threads of XLA's pool on a CPU, which has one for each core: of
    # two cores it kept both, and no other program ran.
    most_waits = 0 if backend == "gpu" else (len(os.sched_getaffinity(0)) - 1) // 2
    return MaskBoard(board, sizes, vocab_size, most_waits=most_waits)


def _check_calls(backend: str) -> None:
    """Raise Declined where jax returns from a call only when its program has run.

    The thread that has sent a step has its masks made next: it would wait for itself.
    """
    if on := _late_calls():
        raise dispatch.Declined(_why_late(on))
    setting = "jax_cpu_enable_async_dispatch"  # of the client, as it was made
    if backend == "cpu" and not jax.config.read(setting):
        raise dispatch.Declined(f"without {setting} a call returns when its program has run")


def _late_calls() -> list[str]:
    """Return the settings by which jax reads the results of a call before it returns."""
    return [name for name in _DEBUG if getattr(jax.config, name)]


def _why_late(settings: list[str]) -> str:
    return f"with {' and '.join(settings)} a call returns when its results are read"


def _on_cpu(count: int) -> AbstractHostBoard:
    if (named := dispatch.requested()) not in (None, "ffi", *dispatch.others()):
        raise dispatch.Declined(f"{dispatch.ENV} asks for {named}, not for ffi")
    return HostBoard(count)


_BOARDS = {"gpu": dispatch.backend_kernel("cuda", "HostBoard"), "cpu": _on_cpu}
