"""Processes that tests have started end with the process that runs the tests."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import left_behind

RUN = """
import signal, subprocess, sys
from support.processes import left_behind
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test of the worker may have it ignored
left_behind.watch()
code = "import signal, subprocess, sys;"
code += "signal.signal(signal.SIGTERM, signal.SIG_DFL);"
code += "child = subprocess.Popen(['sleep', '600'], start_new_session=True);"
code += "print(child.pid, flush=True); child.wait()"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_a_process_that_a_signal_ends(sign):
    command, path = [sys.executable, "-c", RUN], str(Path(left_behind.__file__).parents[2])
    environ = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        numbers = [int(parent.stdout.readline()) for _ in range(2)]
        ends = [os.pidfd_open(number) for number in numbers]
        try:
            assert select.select(ends, [], [], 0)[0] == []
            parent.send_signal(sign)
            for end in ends:  # of a parent for which nobody waits meanwhile
                assert select.select([end], [], [], 60)[0], "a child is left behind"
            parent.wait(60)
        finally:
            for end in ends:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(end, signal.SIGKILL)
                os.close(end)


def test_one_that_stays_is_killed():
    mark = f"{os.getpid()}-of-a-test"
    environ = os.environ | {left_behind.MARK: mark}
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(600)"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert list(left_behind.marked(mark)) == [child.pid]
        left_behind.end(mark, leave_s=0.3)
        assert child.wait(60) == -signal.SIGKILL
