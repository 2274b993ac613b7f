"""The fields of a request that name its user, in their order."""

from types import SimpleNamespace

import pytest

from serving.http.requests.protocol import CompletionBody
from serving.http.requests.session import session_key

ORDER = ["prompt_cache_key", "safety_identifier", "user"]


@pytest.mark.parametrize("given", range(len(ORDER) + 1))
def test_the_header_then_the_body_then_the_request(given):
    body = CompletionBody(**{name: name for name in ORDER[given:]})
    request = SimpleNamespace(headers={}, scope={"state": {"request_id": "r"}})
    want = ORDER[given] if given < len(ORDER) else "r"
    assert session_key(request, body) == want
    request.headers["X-Session-ID"] = "s"
    assert session_key(request, body) == "s"


def test_empty_words_name_nobody():
    request = SimpleNamespace(headers={"X-Session-ID": ""}, scope={"state": {"request_id": "r"}})
    assert session_key(request, CompletionBody(prompt_cache_key="", user="u")) == "u"
