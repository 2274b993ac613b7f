"""A function's start: orders that it cannot meet, and what it says of a device without memory."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from support.processes.process_facts import open_files
from support.processes.server_process import ROOT

from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, receive_header, send_fds, send_header
from lora_jax.models.shared_weights import load_into_arena
from serving.functions import calls, function_process, jail

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
        before = open_files()
        function_process.main(theirs)
        answer = receive_header(ours)
        assert len(open_files() - before) <= 1  # of many of the backbone, that of its file
    close_all(fds)
    assert words in answer["error"]
    assert "Function 'f' cannot start" in answer["error"]


def entered(order, monkeypatch):
    """Return what a process of the order asks its jail for: positions, then names."""
    asked = []
    enter = lambda *given, **more: asked.append((given, more)) or ["Landlock"]  # noqa: E731
    monkeypatch.setattr(function_process.jail, "enter", enter)
    monkeypatch.setattr(function_process.jail, "code_folders", lambda without: [Path("code")])
    base = {"name": "f", "fields": {}, "jail": {"memory_bytes": None, "gpus": False}}
    function_process._enter_jail(base | order, [Path("programs")])
    ((reads, writes, lists), more) = asked[0]
    return {str(path) for path in reads}, {str(path) for path in writes}, lists, more


def test_a_jail_opens_the_files_that_an_order_names_and_no_others(tmp_path, monkeypatch, caplog):
    """Adapters of others lie below the model's folder, and folders may be called as settings."""
    model, law = tmp_path / "model", tmp_path / "model" / "adapters" / "law"
    chat, generation = tmp_path / "chat.jinja", tmp_path / "generation"
    for folder in (law, law.parent / "other", generation, tmp_path / "cache"):
        folder.mkdir(parents=True)
    for name in ("auto", "hermes", "assistant", "bfloat16", "http:"):
        (tmp_path / name).mkdir()
    for file in (model / "config.json", law / "weights", chat, generation / "generation.json"):
        file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function_process.dispatch, "cache_folder", lambda: tmp_path / "cache")
    fields = {"dtype": "bfloat16", "chat_template": str(chat), "generation_config": "auto"}
    settings = {"tool_call_parser": "hermes", "response_role": "assistant"}
    order = {"model": str(model), "adapter": str(law), "fields": fields}
    order |= {"http": {"settings": settings, "budgets_folder": "budgets"}}
    reads, writes, lists, more = entered(order, monkeypatch)
    own = {str(path) for path in (model / "config.json", law, law / "weights", chat)}
    assert reads == {"code", str(tmp_path / "cache"), "programs", *own}
    assert writes == {"budgets"}
    assert lists == [model]
    assert more == {"memory_bytes": None, "network": False, "gpus": False, "programs": []}
    assert "runs without Landlock" in caplog.text
    fields["generation_config"] = str(generation)
    files = {str(generation), str(generation / "generation.json")}
    assert entered(order, monkeypatch)[0] - reads == files


def test_a_jail_has_the_limits_of_its_order(monkeypatch):
    order = {"model": "/nowhere", "adapter": None}
    more = entered(order | {"jail": {"memory_bytes": 7, "gpus": True}}, monkeypatch)[3]
    assert more == {"memory_bytes": 7, "network": False, "gpus": True, "programs": []}
    traced = {"fields": {"otlp_traces_endpoint": "http://127.0.0.1:4317"}}
    assert entered(order | traced, monkeypatch)[3]["network"]
    engine = {"manifest": {}, "fields": {"structured_outputs": True}}
    assert entered(order | engine, monkeypatch)[3]["programs"] == jail.interpreter()
    tenant = {"fields": {"structured_outputs": True}}
    assert entered(order | tenant, monkeypatch)[3]["programs"] == []
    makes = {"programs": {"writes": True}}
    assert entered(order | makes, monkeypatch)[1] == {"programs"}
    assert entered(order | {"programs": {"writes": False}}, monkeypatch)[1] == set()


LIFE = """
import os, socket
from types import SimpleNamespace
from serving.functions import function_process, jail
ours, theirs = socket.socketpair()
order = {"name": "f", "adapter": None, "model": "/nowhere", "fields": {}, "tenant": True}
order |= {"jail": {"memory_bytes": None, "gpus": False}, "device": "cpu"}
function_process.receive_header = lambda connection: order
jail.enter = lambda *given, **more: print("jail") or []
def run(connection, given, count):
    with open("/proc/self/status") as status:
        bound = dict(line.split(":\t", 1) for line in status)
    print(os.stat("/proc/self/environ").st_uid, bound["NoNewPrivs"].strip())
    print(function_process.ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
function_process.importlib = SimpleNamespace(import_module=lambda name: SimpleNamespace(run=run))
function_process.main(theirs)
"""


def test_a_process_shuts_others_out_and_enters_its_jail_before_it_reads_an_adapter():
    """Then no process of its user may trace it or read its memory."""
    done = subprocess.run([sys.executable, "-c", LIFE], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["jail", "0", "1", "0"], done.stderr  # files in /proc are root's


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
