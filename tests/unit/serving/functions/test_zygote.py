"""The zygote ends with its agent; what it forks is tested in test_agent.py."""

import socket
import subprocess
import sys

import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.wire import receive_header


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
zygote._prepare("cpu", sys.argv[1], None)
assert _abstract.cache_info().currsize == jail._folders_of.cache_info().currsize == 1
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.long
def test_what_is_prepared_before_a_fork_touches_no_device():
    """CUDA does not survive a fork."""
    command = [sys.executable, "-c", PREPARE, str(ROOT / "assets" / "tiny-moe")]
    subprocess.run(command, check=True, timeout=120)
