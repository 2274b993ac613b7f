"""A function's side of its connection: bad orders, bad calls, and what it says of its memory."""

import json
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, receive_header, send_fds, send_header
from lora_jax.models.shared_weights import load_into_arena
from serving.functions import function_process
from serving.functions.function_process import _Calls, backbone_memory
from serving.runtime import program_cache

MODEL = str(ROOT / "assets" / "stories260k")
SMAPS = """\
7f00-7f10 r--s 00000000 00:01 5 /memfd:lora_jax_pages (deleted)
Size:               3744 kB
Pss:                1872 kB
Pss_Dirty:            10 kB
7f20-7f30 rw-p 00000000 00:00 0 [heap]
Size:                 99 kB
Pss:                  99 kB
7f40-7f50 r--s 00000000 00:01 5 /memfd:lora_jax_pages (deleted)
Size:                  4 kB
Pss:                   2 kB
"""


def test_memory_is_the_sum_over_the_backbone_s_maps(tmp_path):
    file = tmp_path / "smaps"
    file.write_text(SMAPS)
    assert backbone_memory(str(file)) == {"Size": 3748 << 10, "Pss": 1874 << 10}


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
    good = {"name": "f", "adapter": None, "model": MODEL, "fields": {}}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, good | {"manifest": arena.manifest.fields()} | order)
        send_fds(ours, fds)
        function_process.main(theirs)
        answer = receive_header(ours)
    close_all(fds)
    assert words in answer["error"]
    assert "Function 'f' cannot start" in answer["error"]


@pytest.mark.parametrize(
    ("gpus", "demands", "answer"),
    [(True, True, "not ready"), (True, False, "error"), (False, True, "error")],
)
def test_a_device_without_memory_is_told_and_not_taken_for_missing_programs(
    gpus, demands, answer, monkeypatch
):
    """But in a GPU's jail, where XLA's assembler cannot start, which looks the same."""

    def no_memory(*arguments, **fields):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    arena = SimpleNamespace(close=lambda: None)
    for name, stand_in in (
        ("_shut_others_out", lambda: None),
        ("_enter_jail", lambda order, folders: None),
        ("keep_programs_apart", lambda **programs: []),
        ("parse_manifest", lambda fields: SimpleNamespace(blocks=())),
        ("receive_fds", lambda connection, count: []),
        ("ImportedArena", lambda *parts: arena),
        ("step_files", lambda: None),
        ("Engine", no_memory),
    ):
        monkeypatch.setattr(function_process, name, stand_in)
    order = {"name": "f", "adapter": None, "model": MODEL, "fields": {}, "manifest": {}}
    order |= {"programs": {"demands": demands}, "jail": {"gpus": gpus}}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, order)
        function_process.main(theirs)
        said = receive_header(ours)
    text = "Function 'f' cannot start: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"
    error = {"error": text, "retryable": True}
    assert said == (error if answer == "error" else {"ready": False})


PLANT = """
import json, os, sys
from pathlib import Path
from serving.functions.function_process import _enter_jail
from serving.runtime.program_cache import keep_programs_apart
made, order = [], json.loads(sys.argv[1])
folders = keep_programs_apart(**order["programs"])
_enter_jail(order, folders)
for folder in folders:
    for file in (folder / "planted.program", folder.parent / "planted", folder / "kept.program"):
        try:
            file.write_bytes(b"code of an attacker")
            made.append(str(file))
        except PermissionError:
            pass
read = [(folder / "kept.program").read_text() for folder in folders]
print(json.dumps([[str(f) for f in folders], made, read]))
"""


@pytest.mark.parametrize("writes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_function_cannot_plant_a_program_that_others_would_load(tmp_path, writes):
    """The one process that makes programs has no adapter."""
    programs = {"kind": "functions", "writes": writes}
    order = {"model": MODEL, "adapter": None, "fields": {}, "programs": programs}
    order["jail"] = {"memory_bytes": None, "gpus": False}
    machine = program_cache._machine()
    for folder in ("programs/functions", "programs/functions/steps"):
        (tmp_path / folder / machine).mkdir(parents=True, mode=0o700)
        (tmp_path / folder / machine / "kept.program").write_text("kept")
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", PLANT, json.dumps(order)]
    env = {n: v for n, v in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"LORA_JAX_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    if "Landlock" in done.stderr:
        pytest.skip("this kernel has no Landlock")
    folders, made, _ = json.loads(done.stdout)
    assert len(folders) == 2
    here = [f"{folder}/{name}.program" for folder in folders for name in ("planted", "kept")]
    assert made == (here if writes else [])


class NoEngine:
    """An engine that refuses everything."""

    def generate(self, prompts, adapter, sampling):
        raise ValueError(f"{adapter} got {len(prompts)} prompts, {sampling[0].max_tokens}")


class StuckEngine:
    """An engine whose answers for one adapter do not come before the end."""

    def __init__(self):
        self.end = threading.Event()

    def generate(self, prompts, adapter, sampling):
        if adapter == "busy":
            self.end.wait(60)
        return []


def test_calls_of_one_adapter_do_not_hold_up_those_of_others(monkeypatch):
    """More than are answered at a time, in an engine that adapters share."""
    monkeypatch.setattr(function_process, "_CALLS", 2)
    ours, theirs = socket.socketpair()
    engine = StuckEngine()
    with ours, theirs:
        thread = threading.Thread(target=_Calls(theirs, engine, None, None, None).answer)
        thread.start()
        ask = {"call": "generate", "prompts": ["a"], "sampling": [{}]}
        for number in range(5):
            send_header(ours, {"id": number, "adapter": "busy", **ask})
        send_header(ours, {"id": 5, "adapter": "other", **ask})
        assert receive_header(ours) == {"id": 5, "value": []}
        engine.end.set()
        assert {receive_header(ours)["id"] for _ in range(5)} == {*range(5)}
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_threads_of_an_adapter_that_left_end_when_they_have_answered(monkeypatch):
    """Else an engine would keep threads for every adapter that it ever had."""
    ours, theirs = socket.socketpair()
    engine = StuckEngine()
    monkeypatch.setattr(_Calls, "_take", lambda calls, call: None)
    calling = {thread for thread in threading.enumerate() if thread.name.startswith("call")}
    with ours, theirs:
        thread = threading.Thread(target=_Calls(theirs, engine, None, None, None).answer)
        thread.start()
        ask = {"call": "generate", "prompts": ["a"], "sampling": [{}]}
        send_header(ours, {"id": 0, "adapter": "busy", **ask})
        send_header(ours, {"id": 1, "call": "leave", "name": "busy", "epoch": 1})
        assert receive_header(ours) == {"id": 1, "value": None}
        its = {t for t in threading.enumerate() if t.name.startswith("call")} - calling
        assert len(its) == 1
        engine.end.set()
        assert receive_header(ours) == {"id": 0, "value": []}
        its.pop().join(60)
        send_header(ours, {"id": 2, "adapter": "busy", **ask})
        assert receive_header(ours) == {"id": 2, "value": []}
        calls = [t for t in threading.enumerate() if t.name.startswith("call")]
        assert len({*calls} - calling) == 1
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_bad_calls_are_answered_and_the_next_ones_too():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = _Calls(theirs, NoEngine(), None, "law", None)
        thread = threading.Thread(target=calls.answer)
        thread.start()
        for number, call in enumerate(
            [
                {"call": "no such"},
                {"call": "generate", "prompts": ["a"], "sampling": [{"temperature": -1}]},
                {"call": "generate", "prompts": ["a", "b"], "sampling": [{"max_tokens": 5}]},
            ]
        ):
            send_header(ours, {"id": number, **call})
            answer = receive_header(ours)
            assert (answer["id"], answer["error"]) == (number, "ValueError")
        assert answer["text"] == "law got 2 prompts, 5"
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert not thread.is_alive()
