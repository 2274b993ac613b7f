"""Entry of the zygote: no look for garbage while it imports, short ones afterwards."""

import gc
import socket
from types import SimpleNamespace

from serving.functions import zygote_process


def test_imports_are_made_without_looks_for_garbage(monkeypatch):
    seen = []

    def import_module(name):
        seen.append((name, gc.isenabled()))
        return SimpleNamespace(main=lambda control: seen.append((control, gc.isenabled())))

    def freeze():  # before a look could begin
        seen.append(("freeze", gc.isenabled()))

    monkeypatch.setattr(zygote_process.importlib, "import_module", import_module)
    monkeypatch.setattr(gc, "freeze", freeze)
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            zygote_process.main(theirs)
    finally:
        gc.enable()  # where the entry failed to
    assert seen == [("serving.functions.zygote", False), ("freeze", False), (theirs, True)]
