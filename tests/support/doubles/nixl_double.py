"""NIXL in one process: agents that copy into each other's registered memory."""

import ctypes
import threading


class NotFoundError(Exception):
    """As NIXL's own errors, of no common class."""


class Fabric:
    """Makes agents that reach each other; `broken` is how transfers fail: "ended" or "refused"."""

    def __init__(self):
        self.agents, self.registered, self.broken = {}, [], ""
        self.lock = threading.Lock()

    def agent(self, name):
        return self.agents.setdefault(name, Agent(self, name))


class Agent:
    """What the transport uses of a nixl_agent."""

    def __init__(self, fabric, name):
        self._fabric, self.name, self._known = fabric, name, set()
        self._notifications = []

    def get_agent_metadata(self):
        return b"agent " + self.name.encode()

    def add_remote_agent(self, metadata):
        kind, name = metadata.decode().split()
        assert kind == "agent"
        self._known.add(name)

    def register_memory(self, reg_list, mem_type):
        assert mem_type == "DRAM"
        made = (self.name, [(at, at + size) for at, size, _, _ in reg_list])
        self._fabric.registered.append(made)
        return made

    def deregister_memory(self, reg_list):
        self._fabric.registered.remove(reg_list)

    def get_xfer_descs(self, descs, mem_type):
        assert mem_type == "DRAM"
        return descs

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent, notif):
        assert operation == "WRITE"
        assert remote_agent in self._known
        assert self._all_registered(self.name, local_descs)
        if self._fabric.broken == "refused" or not self._all_registered(remote_agent, remote_descs):
            raise NotFoundError("the remote memory is not registered")  # the peer may have gone
        return [local_descs, remote_descs, remote_agent, notif, 0]

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        """Copy at the second look, the way a transfer takes its time."""
        handle[-1] += 1
        if self._fabric.broken == "ended":
            return "ERR"
        if handle[-1] < 2:
            return "PROC"
        local, remote, name, message, _ = handle
        for (source, size, _), (target, same, _) in zip(local, remote, strict=True):
            assert size == same
            ctypes.memmove(target, source, size)
        with self._fabric.lock:
            self._fabric.agents[name]._notifications.append((self.name, message))
        return "DONE"

    def release_xfer_handle(self, handle):
        handle.clear()

    def get_new_notifs(self):
        with self._fabric.lock:
            found, self._notifications = self._notifications, []
        by_name = {}
        for name, message in found:
            by_name.setdefault(name, []).append(message)
        return by_name

    def _all_registered(self, owner, descs):
        return all(self._is_registered(owner, at, size) for at, size, _ in descs)

    def _is_registered(self, owner, at, size):
        return any(
            name == owner and any(low <= at and at + size <= high for low, high in ranges)
            for name, ranges in self._fabric.registered
        )
