"""A conversation in the engine: whose adapter, which role, and nothing left of a bad one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.doubles.fake_engine import FakeEngine

from serving.http.access.keys import Caller
from serving.http.answers.chat_generation import chat_generation
from serving.http.errors import ApiError
from serving.http.requests.adapter_turn import never
from serving.http.requests.protocol import ChatBody
from serving.http.server import Server
from serving.http.settings import HttpSettings

USER = {"role": "user", "content": "yo"}


def asked(engine: FakeEngine, **body):
    """What becomes of a body, and of the request's state."""
    state = SimpleNamespace()
    scope = {"state": {"request_id": "r", "caller": Caller()}}
    request: Any = SimpleNamespace(headers={}, state=state, scope=scope, is_disconnected=never)

    async def make():
        server = Server.build(engine, HttpSettings(response_role="bot"))
        return await chat_generation(request, server, ChatBody(messages=[USER], **body))

    return asyncio.run(make()), state


def test_the_adapter_the_role_and_the_sampling_are_the_body_s(engine):
    chat, state = asked(engine, model="sql", max_tokens=3)
    assert state.adapter == chat.target.adapter == engine.submitted[-1].adapter == "sql"
    assert engine.submitted[-1].sampling.max_tokens == 3
    assert (chat.role, chat.echo, chat.generation.num_choices) == ("bot", "", 1)
    chat.generation.abort()


def test_a_continued_message_keeps_its_role_and_is_echoed(engine):
    chat, _ = asked(engine, echo=True, continue_final_message=True)
    assert (chat.role, chat.echo) == ("user", "yo")
    chat.generation.abort()


def test_a_bad_field_leaves_nothing_in_the_engine(engine):
    before = len(engine.submitted)
    with pytest.raises(ApiError, match="temperature"):
        asked(engine, temperature=-1.0)
    assert len(engine.submitted) == before
