"""A signal during a start ends it in order."""

import os
import signal

import pytest

from serving.runtime.leaving import leave


def test_a_signal_ends_the_process_and_undoes_what_was_begun():
    undone = []

    def start():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            undone.append(True)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit) as ended:
            start()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.code == 0
    assert undone
