"""The zygote ends with its agent; what it forks is tested in test_agent.py."""

import socket
import subprocess
import sys

import pytest

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
