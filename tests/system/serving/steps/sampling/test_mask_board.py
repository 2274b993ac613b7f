"""Programs wait late for masks that the host posts after their dispatch."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doubles.host_board import EmulatedBoard, patience

from lora_jax.ops import dispatch
from lora_jax.ops.cpu import build
from lora_jax.ops.cpu.host_board import HostBoard
from serving.steps.device_users import DeviceUsers
from serving.steps.sampling import mask_board
from serving.steps.sampling.mask_board import MaskBoard, make_board
from serving.steps.sampling.token_masks import NO_MASK, mask_rows, num_words
from serving.steps.step import StepSizes

SIZES = StepSizes(max_seqs=3, max_len=64, page_size=4, num_pages=9, max_logit_rows=4, max_rank=4)
VOCAB = 70


COUNT = SIZES.num_masks * num_words(VOCAB) + SIZES.max_logit_rows


@pytest.fixture(params=[HostBoard, EmulatedBoard], ids=["cpu", "gpu"])
def board(request):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return MaskBoard(request.param(COUNT), SIZES, VOCAB, DeviceUsers())


def test_a_program_takes_the_masks_that_are_posted_after_its_dispatch(board):
    @jax.jit
    def step(address, number, x):
        logits = x @ jnp.ones((x.shape[1], VOCAB), x.dtype)
        return mask_rows(logits, board.read(address, number, logits), jnp.ones(4, bool))

    address, x = jax.device_put(board.address), jnp.ones((4, 256))
    for allowed in (3, 64, 69):  # the last word has bits of no token
        number = board.take_number()
        sent = step(address, np.array([number], np.int32), x)
        board.take_number()  # the next step goes out before the masks of this one are made
        masks = board.new_masks()
        assert (masks.row_to_mask == NO_MASK).all()
        masks.words[2] = 0
        masks.words[2].view(np.uint32)[allowed // 32] = 1 << allowed % 32
        masks.row_to_mask[1] = 2
        board.post(number)
        got = np.asarray(sent)
        assert np.flatnonzero(np.isfinite(got[1])).tolist() == [allowed]
        assert np.isfinite(got[[0, 2, 3]]).all()


@pytest.fixture
def step(board):
    """Return a function that sends a step of a number, whose rows may take every token."""

    @jax.jit
    def masked(address, number, x):
        masks = board.read(address, number, x)
        return mask_rows(x, masks, jnp.ones(4, bool))

    address = jax.device_put(board.address)
    return lambda number: masked(address, np.array([number], np.int32), jnp.ones((4, VOCAB)))


def test_a_step_whose_masks_come_too_late_masks_no_row_and_says_so(board, step):
    numbers = [board.take_number() for _ in range(2)]
    board.new_masks().row_to_mask[:] = 0
    with patience(0.05, emulated=isinstance(board._board, EmulatedBoard)):
        assert np.isfinite(np.asarray(step(numbers[0]))).all()
    assert [board.was_late(number) for number in (0, *numbers)] == [False, True, False]
    board.post(numbers[0])  # nobody waits for it any more
    masks = board.new_masks()
    masks.words[0] = 0
    masks.words[0, 0], masks.row_to_mask[1] = 1, 0
    sent = step(numbers[1])
    board.post(numbers[1])
    assert np.isfinite(np.asarray(sent)).sum(axis=1).tolist() == [VOCAB, 1, VOCAB, VOCAB]
    assert not board.was_late(numbers[1])


def test_who_gives_up_lets_every_step_go_on(board, step):
    numbers = [board.take_number() for _ in range(2)]
    sent = [step(number) for number in numbers]
    board.give_up()
    board.post(numbers[0])  # by a thread that made masks meanwhile
    for each in sent:
        each.block_until_ready()
    assert not any(map(board.was_late, numbers))  # none has waited to the end


def test_numbers_are_never_that_of_no_masks(board, monkeypatch):
    monkeypatch.setattr(mask_board, "_MOST", 2)
    assert [board.take_number() for _ in range(4)] == [1, 2, 1, 2]


def test_beside_others_some_steps_wait_on_a_cpu_and_none_on_a_gpu():
    for most in (0, 1, 2):
        users = DeviceUsers()
        boards = [MaskBoard(HostBoard(COUNT), SIZES, VOCAB, users, most) for _ in range(3)]
        with users.use(), users.use(), users.use():
            assert [board.begin_wait(1) for board in boards] == [at < most for at in range(3)]
            for board in boards:
                board.post(1)
            assert boards[2].begin_wait(2) == (most > 0)


def test_a_cpu_has_a_board_unless_other_kernels_are_asked_for(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(mask_board.os, "sched_getaffinity", lambda _: range(5))
    board = make_board(SIZES, VOCAB)
    assert board is not None
    assert (len(board.new_masks().packed), board._most_waits) == (COUNT, 2)
    for cores in range(1, 5):  # each keeps two threads, and one is left for others
        monkeypatch.setattr(mask_board.os, "sched_getaffinity", lambda _, n=cores: range(n))
        board = make_board(SIZES, VOCAB)
        assert board is not None
        assert board._most_waits == (0, 0, 1, 1)[cores - 1]
    assert not caplog.text
    monkeypatch.setenv("LORA_JAX_OPS", "reference")
    assert make_board(SIZES, VOCAB) is None
    assert "two programs: LORA_JAX_OPS asks for reference, not for ffi" in caplog.text
    monkeypatch.setenv("LORA_JAX_OPS", "own")  # a backend of another package, which has no board
    monkeypatch.setattr(mask_board.dispatch, "others", lambda: ("own",))
    assert make_board(SIZES, VOCAB) is not None
    monkeypatch.delenv("LORA_JAX_OPS")
    monkeypatch.setattr(build, "available", lambda: False)
    assert make_board(SIZES, VOCAB) is None
    assert "two programs: the CPU kernels could not be built" in caplog.text


@pytest.mark.parametrize(
    ("setting", "value", "backends"),
    [
        ("jax_debug_nans", True, {"cpu", "gpu"}),
        ("jax_debug_infs", True, {"cpu", "gpu"}),
        ("jax_cpu_enable_async_dispatch", False, {"cpu"}),
    ],
)
def test_no_program_waits_where_a_call_returns_when_it_has_run(
    setting, value, backends, monkeypatch, caplog
):
    class Board:
        address = np.zeros(2, np.uint32)

    caplog.set_level("INFO")
    jax.config.update(setting, value)
    try:
        for backend in ("cpu", "gpu"):
            caplog.clear()
            monkeypatch.setattr(mask_board.jax, "default_backend", lambda name=backend: name)
            monkeypatch.setitem(mask_board._BOARDS, backend, lambda _: Board())
            assert (make_board(SIZES, VOCAB) is None) == (backend in backends)
            assert (setting in caplog.text) == (backend in backends)
    finally:
        jax.config.update(setting, not value)


@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_debug_infs"])
def test_no_step_waits_once_calls_return_late(setting, caplog):
    """The setting may be changed after the engine's start."""
    users = DeviceUsers()
    board = MaskBoard(HostBoard(COUNT), SIZES, VOCAB, users)
    assert board.begin_wait(board.take_number())
    board.post(1)
    jax.config.update(setting, True)
    try:
        assert not any(board.begin_wait(board.take_number()) for _ in range(3))
    finally:
        jax.config.update(setting, False)
    assert caplog.text.count(f"before their steps: with {setting} a call returns") == 1
    assert users._num_waits == 0
    assert board.begin_wait(board.take_number())


def test_no_program_waits_elsewhere_or_where_memory_is_not_shared(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(mask_board.jax, "default_backend", lambda: "tpu")
    assert make_board(SIZES, VOCAB) is None
    assert not caplog.text
    monkeypatch.setattr(mask_board.jax, "default_backend", lambda: "gpu")

    def decline(count):
        raise NotImplementedError("no shared memory")

    monkeypatch.setitem(mask_board._BOARDS, "gpu", decline)
    assert make_board(SIZES, VOCAB) is None
    assert "two programs: no shared memory" in caplog.text


def test_on_a_gpu_programs_wait(monkeypatch):
    monkeypatch.setattr(mask_board.jax, "default_backend", lambda: "gpu")
    counts = []

    class Board:
        address = np.zeros(2, np.uint32)

        def __init__(self, count):
            counts.append(count)

    monkeypatch.setattr(dispatch, "_backend_ops", lambda name: {"HostBoard": Board})
    board = make_board(SIZES, VOCAB)
    assert board is not None
    assert board.address is Board.address
    assert (counts, board._most_waits) == ([COUNT], 0)
