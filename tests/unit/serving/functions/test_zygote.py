"""The zygote ends with its agent; what it forks is tested in test_agent.py."""

import collections
import gc
import signal
import socket
import subprocess
import sys
import threading

import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.wire import receive_header, send_fds, send_header
from serving.functions import zygote
from serving.lora_server.transport import tenants


@pytest.mark.long
def test_the_zygote_says_that_it_is_ready_and_leaves_with_its_agent():
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "serving.functions.zygote_process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        assert receive_header(ours) == {"ready": True}
    assert process.wait(120) == 0


PREPARE = """
import sys
import threading
from jax._src import xla_bridge
from lora_jax.ops.grouped_matmul import orders
from serving.functions import jail, zygote
assert not {"flax", "serving.engine.engine"} & set(sys.modules)
zygote._prepare("gpu", False)  # a GPU's first function imports Mosaic and the engine itself
assert "cuda_backend.grouped_matmul" in sys.modules
early = {"jax.experimental.pallas.mosaic_gpu", "flax", "serving.engine.engine"} & set(sys.modules)
assert not early, early
zygote._prepare("cpu", False)
orders.build.native.subprocess.run = None  # as in the jail, where no compiler is executed
assert orders.order_of((4, 128), "cpu") != orders.ROWS
idle = zygote.collections.deque(zygote._IDLE)
zygote._import_all(idle)
zygote._learn_shapes(sys.argv[1], None)
assert set(idle) == {"pydantic", "fastapi", "uvicorn.server", "serving.functions.http_side"}
_abstract = sys.modules["lora_jax.models.registry"]._abstract
assert _abstract.cache_info().currsize == jail._folders_of.cache_info().currsize == 1
assert not xla_bridge.backends_are_initialized()
late = {"fastapi", "uvicorn", "pydantic", "jax.experimental.pallas.mosaic_gpu"} & set(sys.modules)
assert not late, late
"""


@pytest.mark.long
def test_what_is_prepared_before_a_fork_touches_no_device():
    """CUDA does not survive a fork."""
    command = [sys.executable, "-c", PREPARE, str(ROOT / "assets" / "tiny-moe")]
    subprocess.run(command, check=True, timeout=120)


def test_a_function_whose_agent_has_gone_before_it_was_ready_leaves_without_a_word(
    monkeypatch, capfd
):
    def start(connection, on_end):
        connection.send(b"ready")

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(zygote.function_process, "main", start)
    monkeypatch.setattr(zygote.os, "_exit", leave)
    before = signal.getsignal(signal.SIGCHLD)
    control, other = socket.socketpair()
    agent, end = socket.socketpair()
    agent.close()
    with other, pytest.raises(SystemExit):
        zygote._be_function(control, end.detach())
    signal.signal(signal.SIGCHLD, before)
    assert capfd.readouterr().err == ""


HANGS = """
import os, socket, time
from serving.functions import zygote
def main(connection, on_end):
    on_end()
    time.sleep(600)  # as the end of an engine whose step never comes back
zygote._END_S, zygote.function_process.main = 1, main
control, end = socket.socketpair()
pid = os.fork()
if pid == 0:
    zygote._be_function(control, end.detach())
print(os.WTERMSIG(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.long
def test_a_function_that_hangs_when_its_agent_has_gone_is_ended_by_the_kernel():
    """It would keep its memory, which on a GPU no other process could take."""
    command = [sys.executable, "-W", "ignore", "-c", HANGS]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert int(done.stdout) == signal.SIGALRM


@pytest.mark.parametrize(
    ("asked_after", "left"), [(0, ["a", "b", "c"]), (2, ["c"]), (None, [])], ids=str
)
def test_an_order_waits_for_no_import_that_was_not_begun(asked_after, left, monkeypatch):
    """`asked_after` so many imports an order comes; None: none comes."""
    names, imported = collections.deque("abc"), []

    def import_one(name):
        imported.append(name)
        if len(imported) == asked_after:
            agent.send(b"x")

    monkeypatch.setattr(zygote, "_import", import_one)
    monkeypatch.setattr(zygote, "_QUIET_S", 0.0)
    agent, control = socket.socketpair()
    with agent, control:
        if asked_after == 0:
            agent.send(b"x")
        zygote._import_until_asked(control, names)
    assert list(names) == left
    assert imported + left == ["a", "b", "c"]


def test_a_module_that_is_not_there_is_left_out(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    zygote._import("no_such_module_anywhere")
    assert gc.isenabled()
    assert frozen == [False]


def test_a_compiler_that_fails_is_seen_to_fail(monkeypatch):
    """While SIGCHLD is ignored, Popen says 0 for every program that has ended."""
    codes = []
    build = lambda: codes.append(subprocess.run(["false"], check=False).returncode)  # noqa: E731
    monkeypatch.setattr(zygote, "_load_plugins", lambda: None)
    monkeypatch.setattr(tenants, "prepare", build)
    monkeypatch.setitem(zygote._KERNELS, "cpu", build)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        zygote._prepare.__wrapped__("cpu", True)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert codes == [1, 1]


@pytest.mark.parametrize(("device", "first"), [("gpu", "fork"), ("cpu", "import")])
def test_the_first_order_for_a_gpu_does_not_wait_for_the_engine(device, first, monkeypatch):
    """Its function imports that beside the driver's start; a CPU has nothing to put beside it."""
    events = []
    stand_ins = {
        "_prepare": lambda *order: None,
        "_learn_shapes": lambda *order: events.append("shapes"),
        "_import": lambda name: events.append("import"),
        "code_digest": lambda: "",
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(zygote, name, stand_in)
    monkeypatch.setattr(zygote.signal, "signal", lambda *given: None)
    monkeypatch.setattr(zygote.gc, "freeze", lambda: None)
    monkeypatch.setattr(zygote.os, "fork", lambda: events.append("fork") or 7)
    monkeypatch.setattr(zygote, "_import_until_asked", lambda control, idle: None)
    agent, control = socket.socketpair()
    order = {"device": device, "tenants": False, "model": "m", "dtype": None}
    with control:
        with agent:
            for _ in range(2):
                send_header(agent, order)
                send_fds(agent, [control.fileno()])
            thread = threading.Thread(target=zygote.main, args=(control,))
            thread.start()
            assert receive_header(agent) == {"ready": True}
            assert [receive_header(agent)["pid"] for _ in range(2)] == [7, 7]
        thread.join(60)
    all_ = ["import"] * len(zygote._ALL)
    late = ["fork", *all_] if first == "fork" else [*all_, "shapes", "fork"]
    assert events == [*late, "shapes", "fork"]
