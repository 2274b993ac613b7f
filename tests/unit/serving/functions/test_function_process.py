"""A function's start: orders that it cannot meet, and what it says of a device without memory."""

import socket
from types import SimpleNamespace

import jax
import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, receive_header, send_fds, send_header
from lora_jax.models.shared_weights import load_into_arena
from serving.functions import calls, function_process

MODEL = str(ROOT / "assets" / "stories260k")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"fields": {"dtype": "bfloat16"}}, "same folder and dtype"),
        pytest.param({"fields": {"no_such_field": 1}}, "no_such_field", marks=pytest.mark.long),
        ({"fields": {"max_esft_adapters": 2}}, "max_esft_adapters 2"),
        pytest.param({"model": "/nowhere"}, "nowhere", marks=pytest.mark.long),
    ],
)
def test_orders_that_cannot_be_met_are_answered_with_the_reason(order, words, monkeypatch):
    monkeypatch.setattr(function_process, "_shut_others_out", lambda: None)  # it is for good
    _, _, arena = load_into_arena(MODEL, HostMemory())
    fds = arena.export()
    good = {"name": "f", "adapter": None, "model": MODEL, "fields": {}, "device": "cpu"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, good | {"manifest": arena.manifest.fields()} | order)
        send_fds(ours, fds)
        function_process.main(theirs)
        answer = receive_header(ours)
    close_all(fds)
    assert words in answer["error"]
    assert "Function 'f' cannot start" in answer["error"]


def late_imports(engine):
    """Stand in for imports beside a start, with another maker of engines."""
    return SimpleNamespace(get=lambda name: SimpleNamespace(Engine=engine))


NO_MEMORY = "RESOURCE_EXHAUSTED: out of memory"
NO_ASSEMBLER = "INTERNAL: ptxas cannot start"


@pytest.mark.parametrize(
    ("gpus", "demands", "text", "is_told"),
    [
        (True, True, NO_ASSEMBLER, False),
        (True, False, NO_ASSEMBLER, True),
        (False, True, NO_ASSEMBLER, True),
        (True, True, NO_MEMORY, True),
    ],
)
def test_a_device_without_memory_is_told_and_not_taken_for_missing_programs(
    gpus, demands, text, is_told, monkeypatch
):
    """Another error in a GPU's jail may be XLA's assembler, which cannot start there."""

    def fail(*arguments, **fields):
        raise jax.errors.JaxRuntimeError(text)

    arena = SimpleNamespace(close=lambda: None)
    for name, stand_in in (
        ("_shut_others_out", lambda: None),
        ("_enter_jail", lambda order, folders: None),
        ("keep_programs_apart", lambda **programs: []),
        ("parse_manifest", lambda fields: SimpleNamespace(blocks=())),
        ("receive_fds", lambda connection, count: []),
        ("ImportedArena", lambda *parts: arena),
        ("step_files", lambda: None),
        ("LateImports", lambda names: late_imports(fail)),
    ):
        monkeypatch.setattr(function_process, name, stand_in)
    order = {"name": "f", "adapter": None, "model": MODEL, "fields": {}, "manifest": {}}
    order |= {"programs": {"demands": demands}, "jail": {"gpus": gpus}, "device": "cpu"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, order)
        function_process.main(theirs)
        said = receive_header(ours)
    error = {"error": f"Function 'f' cannot start: JaxRuntimeError: {text}", "retryable": True}
    lacks = {"ready": False, "missing": f"JaxRuntimeError: {text}", "sizes": {}}
    assert said == (error if is_told else lacks)


@pytest.mark.parametrize(
    "error",
    [jax.errors.JaxRuntimeError(NO_MEMORY), ValueError(f"No room. The device says: {NO_MEMORY}")],
    ids=["an array", "a step"],
)
def test_a_process_whose_bound_was_too_small_says_that_it_lacks_memory(error, monkeypatch):
    def fail(*parts, **fields):
        raise error

    monkeypatch.setattr(function_process.xla_memory, "is_bounded", lambda: True)
    monkeypatch.setattr(function_process, "_shut_others_out", lambda: None)  # it is for good
    monkeypatch.setattr(calls, "Engine", fail)
    _, _, arena = load_into_arena(MODEL, HostMemory())
    fds = arena.export()
    order = {"name": "f", "adapter": None, "model": MODEL, "fields": {}, "device": "cpu"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, order | {"manifest": arena.manifest.fields()})
        send_fds(ours, fds)
        function_process.main(theirs)
        said = receive_header(ours)
    close_all(fds)
    assert said["lacks_memory"]
    assert not said["ready"]


def test_turns_come_with_their_own_connection_and_the_functions_limits(monkeypatch):
    monkeypatch.setattr(function_process, "TurnSide", lambda *given: given)
    assert function_process._turns_of(None, {"model": MODEL, "fields": {}}) is None
    ours, theirs = socket.socketpair()
    end, other = socket.socketpair()
    with ours, theirs, end:
        with other:
            send_fds(ours, [other.fileno()])
        order = {"turns": {"slo_s": 0.5}, "model": MODEL, "fields": {"max_num_seqs": 3}}
        connection, slo_s, limit = function_process._turns_of(theirs, order)
        assert (slo_s, limit) == (0.5, 3)
        with connection:
            connection.send(b"x")
        assert end.recv(1) == b"x"
