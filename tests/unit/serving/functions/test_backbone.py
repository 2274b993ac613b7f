"""The process that loads a backbone hands over memory that outlives it, or a reason."""

import socket
import threading

import pytest
from support.processes.process_facts import open_files
from support.processes.server_process import ROOT

from lora_jax.memory.arena import ImportedArena, parse_manifest
from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, receive_fds, receive_header, send_header
from serving.functions import backbone


def test_a_model_arrives_as_manifest_and_descriptors():
    before = open_files()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = {"model": str(ROOT / "assets" / "stories260k"), "dtype": None}
        send_header(ours, order)
        thread = threading.Thread(target=backbone.main, args=(theirs,))
        thread.start()
        answer = receive_header(ours)
        manifest = parse_manifest(answer["manifest"])
        fds = receive_fds(ours, len(manifest.blocks))
        thread.join(0.05)
        assert thread.is_alive()  # descriptors that are on their way are lost with their sender
        send_header(ours, {"received": len(fds)})
        thread.join(60)
    assert not thread.is_alive()
    # One file of many blocks is left, which the arena holds.
    pages = [name for _, name in open_files() - before if "lora_jax_pages" in name]
    assert len(pages) <= len(fds) + 1
    assert answer["digest"] == manifest.digest
    arena = ImportedArena(HostMemory(), manifest, fds)
    close_all(fds)
    assert arena.changed() == []
    arena.close()


def test_a_model_that_takes_images_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, {"model": str(ROOT / "assets" / "tiny-vl"), "dtype": None})
        backbone.main(theirs)
        assert "takes images, which functions do not serve yet" in receive_header(ours)["error"]


@pytest.mark.parametrize(("dtype", "words"), [(None, "no folder"), ("float16", "float16")])
def test_models_that_cannot_be_shared_are_said(dtype, words):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        model = "/nowhere" if dtype is None else str(ROOT / "assets" / "stories260k")
        send_header(ours, {"model": model, "dtype": dtype})
        backbone.main(theirs)
        assert words in receive_header(ours)["error"]
