"""Response parts of completions and chat."""

import asyncio

from support.doubles.fake_engine import FakeEngine

from serving.api.request import FinishReason, OutputDelta
from serving.api.sampling import Sampling
from serving.http.answers.answers import cache_salt
from serving.http.answers.generation import Generation, Piece
from serving.http.requests.prompts import Prompt
from serving.http.requests.protocol import CompletionBody
from serving.http.routes.completions import CompletionAnswer
from serving.runtime.mailbox import Mailbox

PROMPT = Prompt([1], None)


def answer_to(**body) -> CompletionAnswer:
    async def make() -> CompletionAnswer:
        engine = FakeEngine()
        generation = Generation(engine, Mailbox(), [PROMPT])
        generation.submit(None, [Sampling(max_tokens=1)], "")
        return CompletionAnswer(CompletionBody(**body), generation, "m", engine.tokenizer)

    return asyncio.run(make())


def test_salts_stack():
    assert cache_salt("", None) == ""
    assert cache_salt("tenant", None) == "tenant"
    assert cache_salt("", "mine") != cache_salt("tenant", "mine") != cache_salt("tenant", None)


def test_tokens_without_text_wait_unless_somebody_looks_at_them():
    silent = Piece(0, PROMPT, OutputDelta("x", 0, "", (7,)))
    assert answer_to(stream=True).of(silent) == []
    assert answer_to(stream=True, return_token_ids=True).of(silent)[0]["choices"]
    last = Piece(0, PROMPT, OutputDelta("x", 0, "", (), finish_reason=FinishReason.STOP))
    chunk = answer_to(stream=True).of(last)[0]
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_every_answer_has_its_own_id():
    one, two = answer_to(), answer_to()
    assert one.chunk([])["id"] != two.chunk([])["id"]
    assert one.chunk([])["id"] == one.chunk([])["id"]
