"""The zygote ends with its agent; what it forks is tested in test_agent.py."""

import signal
import socket
import subprocess
import sys

import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.wire import receive_header
from serving.functions import zygote


@pytest.mark.long
def test_the_zygote_says_that_it_is_ready_and_leaves_with_its_agent():
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "serving.functions.zygote", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        assert receive_header(ours) == {"ready": True}
    assert process.wait(120) == 0


PREPARE = """
import sys
from jax._src import xla_bridge
from lora_jax.models.loader import read_config, wanted_dtype
from lora_jax.models.registry import _abstract
from serving.functions import jail, zygote
zygote._prepare("cpu", sys.argv[1], None, False)
assert _abstract.cache_info().currsize == jail._folders_of.cache_info().currsize == 1
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.long
def test_what_is_prepared_before_a_fork_touches_no_device():
    """CUDA does not survive a fork."""
    command = [sys.executable, "-c", PREPARE, str(ROOT / "assets" / "tiny-moe")]
    subprocess.run(command, check=True, timeout=120)


def test_a_compiler_that_fails_is_seen_to_fail(monkeypatch):
    """While SIGCHLD is ignored, Popen says 0 for every program that has ended."""
    codes = []
    build = lambda: codes.append(subprocess.run(["false"], check=False).returncode)  # noqa: E731
    monkeypatch.setattr(zygote, "_load_plugins", lambda device: None)
    monkeypatch.setattr(zygote, "prepare", build)
    monkeypatch.setitem(zygote._KERNELS, "cpu", build)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        zygote._prepare.__wrapped__("cpu", "nowhere", None, True)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert codes == [1, 1]
