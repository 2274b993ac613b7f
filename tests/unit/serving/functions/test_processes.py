"""Processes of an agent: reasons of those that do not get ready; forks are in test_agent.py."""

import socket

import pytest

from lora_jax.memory.wire import send_header
from serving.functions.processes import expect


def test_a_process_that_is_not_ready_says_why_or_has_ended():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send_header(theirs, {"ready": True, "start_s": 1})
            send_header(theirs, {"error": "no such adapter"})
        assert expect(ours, "ready")["start_s"] == 1
        with pytest.raises(ValueError, match="no such adapter"):
            expect(ours, "ready")
        with pytest.raises(ConnectionError, match="ended before it was ready"):
            expect(ours, "ready")
