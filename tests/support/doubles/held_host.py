"""A host whose processes do nothing: the test has their ends of the connections, and plays them."""

import os
import signal
from multiprocessing.connection import Connection

from serving.runtime.child_process import AbstractFarProcess
from serving.runtime.role_host import ThisHost


class HeldProcess(AbstractFarProcess):
    """A process that ends when the test or its handle says so."""

    def __init__(self, name, args):
        self.name, self.args, self.is_started = name, args, False
        self._read, self._write = os.pipe()

    @property
    def sentinel(self):
        return self._read

    def start(self):
        self.is_started = True

    def finish(self, status):
        if self.exitcode is None:
            self.exitcode = status
            os.close(self._write)

    def join(self, timeout=None):
        """It has ended, or does not."""

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.finish(-signal.SIGKILL)

    def is_at_work(self):
        return False

    def close(self):
        os.close(self._read)


class HeldHost(ThisHost):
    """Keeps the far ends of its pipes and the processes that were made, in their order."""

    def __init__(self, address=None):
        self.address, self.has_own_gpus = address, address is not None
        self.ends: list[Connection] = []
        self.made: list[HeldProcess] = []
        self.why: Exception | None = None  # the next process is refused

    def pipe(self):
        ours, theirs = super().pipe()
        self.ends.append(Connection(os.dup(theirs.fileno())))
        return ours, theirs

    def process(self, target, args, name):
        if self.why is not None:
            raise self.why
        self.made.append(HeldProcess(name, args))
        return self.made[-1]

    def free_port(self):
        return 1

    def close(self):
        """Close the far ends."""
        for end in self.ends:
            end.close()
