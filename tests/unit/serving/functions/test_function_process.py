"""A function's side of its connection: bad orders, bad calls, and what it says of its memory."""

import socket
import threading

import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, receive_header, send_fds, send_header
from lora_jax.models.shared_weights import load_into_arena
from serving.functions import function_process
from serving.functions.function_process import _Calls, backbone_memory

MODEL = str(ROOT / "assets" / "stories260k")
SMAPS = """\
7f00-7f10 r--s 00000000 00:01 5 /memfd:lora_jax_pages (deleted)
Size:               3744 kB
Pss:                1872 kB
Pss_Dirty:            10 kB
7f20-7f30 rw-p 00000000 00:00 0 [heap]
Size:                 99 kB
Pss:                  99 kB
7f40-7f50 r--s 00000000 00:01 5 /memfd:lora_jax_pages (deleted)
Size:                  4 kB
Pss:                   2 kB
"""


def test_memory_is_the_sum_over_the_backbone_s_maps(tmp_path):
    file = tmp_path / "smaps"
    file.write_text(SMAPS)
    assert backbone_memory(str(file)) == {"Size": 3748 << 10, "Pss": 1874 << 10}


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"fields": {"dtype": "bfloat16"}}, "same folder and dtype"),
        pytest.param({"fields": {"no_such_field": 1}}, "no_such_field", marks=pytest.mark.long),
        ({"fields": {"max_esft_adapters": 2}}, "max_esft_adapters 2"),
        pytest.param({"model": "/nowhere"}, "nowhere", marks=pytest.mark.long),
    ],
)
def test_orders_that_cannot_be_met_are_answered_with_the_reason(order, words, monkeypatch):
    monkeypatch.setattr(function_process, "_shut_others_out", lambda: None)  # it is for good
    _, _, arena = load_into_arena(MODEL, HostMemory())
    fds = arena.export()
    good = {"name": "f", "adapter": None, "model": MODEL, "fields": {}}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_header(ours, good | {"manifest": arena.manifest.fields()} | order)
        send_fds(ours, fds)
        function_process.main(theirs)
        answer = receive_header(ours)
    close_all(fds)
    assert words in answer["error"]
    assert "Function 'f' cannot start" in answer["error"]


class NoEngine:
    """An engine that refuses everything."""

    def generate(self, prompts, adapter, sampling):
        raise ValueError(f"{adapter} got {len(prompts)} prompts, {sampling[0].max_tokens}")


def test_bad_calls_are_answered_and_the_next_ones_too():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = _Calls(theirs, NoEngine(), None, "law", None)
        thread = threading.Thread(target=calls.answer)
        thread.start()
        for number, call in enumerate(
            [
                {"call": "no such"},
                {"call": "generate", "prompts": ["a"], "sampling": [{"temperature": -1}]},
                {"call": "generate", "prompts": ["a", "b"], "sampling": [{"max_tokens": 5}]},
            ]
        ):
            send_header(ours, {"id": number, **call})
            answer = receive_header(ours)
            assert (answer["id"], answer["error"]) == (number, "ValueError")
        assert answer["text"] == "law got 2 prompts, 5"
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert not thread.is_alive()
