"""Completions: prompts of every form, choices, echo, log-probabilities, streams."""

import json

import pytest
from support.doubles.fake_engine import BOS, letters

from serving.http.answers.generation import Generation


def complete(client, **body) -> dict:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(prompt: str | list[int], adapter: str | None, index: int, count: int) -> str:
    ids = [BOS, *prompt.encode()] if isinstance(prompt, str) else prompt
    return "".join(map(chr, letters(ids, adapter, index, count)))


def events(client, **body) -> list[dict]:
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(answer.iter_text()).removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(b.removeprefix("data: ")) for b in blocks if b.startswith("data: ")]


def test_pieces_of_a_stream_wake_the_event_loop_and_those_of_a_whole_answer_do_not(
    client, monkeypatch
):
    seen, pieces = [], Generation.pieces

    def noted(self, *args):
        seen.append(self.is_whole)
        return pieces(self, *args)

    monkeypatch.setattr(Generation, "pieces", noted)
    complete(client, prompt="hi", max_tokens=4)
    events(client, prompt="hi", max_tokens=4)
    assert seen == [True, False]


def test_answer_has_openai_s_shape(client):
    answer = complete(client, prompt="hi", max_tokens=4)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake-base"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": text("hi", None, 0, 4),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "singles"),
    [
        ("hi", ["hi"]),
        (["hi", "ho"], ["hi", "ho"]),
        ([104, 105], [[104, 105]]),
        ([[104, 105], [111]], [[104, 105], [111]]),
    ],
)
def test_every_form_of_prompt_gives_choices_in_order(client, prompt, singles):
    choices = complete(client, prompt=prompt, n=2, max_tokens=3)["choices"]
    want = [text(single, None, k, 3) for single in singles for k in range(2)]
    assert [c["text"] for c in choices] == want
    assert [c["index"] for c in choices] == list(range(len(want)))


@pytest.mark.parametrize("prompt", ["", [], None, [""], [[]], ["a", 1], [[1], "a"], [260], [-1]])
def test_prompts_that_are_none(client, prompt):
    body = {"prompt": prompt, "add_special_tokens": False}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_too_many_prompts(client):
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 1025})
    assert answer.status_code == 400
    assert "1025" in answer.json()["error"]["message"]


def test_every_field_may_be_null(client):
    fields = ("suffix", "logprobs", "seed", "stop", "n", "echo", "stream", "stream_options")
    fields += ("max_tokens", "temperature", "top_p", "logit_bias", "user", "best_of", "cache_salt")
    answer = complete(client, prompt="hi", model=None, **dict.fromkeys(fields))
    assert answer["usage"]["completion_tokens"] == 64 - 3


def test_model_echoes_the_adapter(client):
    for body in ({"model": "sql"}, {"model": "fake-base:sql"}, {"lora_path": "sql"}):
        answer = complete(client, prompt="hi", max_tokens=4, **body)
        assert answer["model"] == "sql"
        assert answer["choices"][0]["text"] == text("hi", "sql", 0, 4)


def test_default_max_tokens_is_cut_to_the_context_and_an_explicit_one_is_not(client):
    prompt = [1] * 60
    assert complete(client, prompt=prompt)["usage"]["completion_tokens"] == 4
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.post("/v1/completions", json={"prompt": prompt, name: 5})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


def test_prompt_too_long_is_vllm_s_400(client):
    answer = client.post("/v1/completions", json={"prompt": [1] * 65})
    message = "Input length (65) exceeds model's maximum context length (64)."
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message


def test_scoring_needs_no_new_token(client):
    body = {"prompt": [65, 66, 67], "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = complete(client, **body)["choices"][0]
    assert choice["text"] == "ABC"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["A", "B", "C"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([-0.566, -0.567])
    full = client.post("/v1/completions", json=body | {"prompt": [65] * 64})
    assert full.status_code == 200


def test_echo_with_logprobs_counts_offsets_over_prompt_and_answer(client):
    choice = complete(client, prompt="hi", max_tokens=2, echo=True, logprobs=1)["choices"][0]
    want = text("hi", None, 0, 2)
    assert choice["text"] == "hi" + want
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", *want]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5, 6]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert len(choice["logprobs"]["top_logprobs"][-1]) == 2


def test_echo_of_ids_decodes_them(client):
    assert complete(client, prompt=[104, 105], echo=True, max_tokens=1)["choices"][0][
        "text"
    ].startswith("hi")


def test_token_ids_and_prompt_logprobs_on_request(client):
    answer = complete(
        client,
        prompt=[65, 66],
        max_tokens=2,
        return_token_ids=True,
        prompt_logprobs=0,
        logprobs=0,
        return_tokens_as_token_ids=True,
    )
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [65, 66]
    assert choice["token_ids"] == letters([65, 66], None, 0, 2)
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["66"]["logprob"] == pytest.approx(-0.566)


def test_stream_gives_the_same_as_at_once(client):
    body = {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 5, "echo": True, "logprobs": 1}
    body |= {"model": "law"}
    whole = complete(client, **body)
    chunks = events(client, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all("usage" not in c for c in chunks[:-1])
    assert {c["model"] for c in chunks} == {"law"}
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1]]
        mine = [c for c in mine if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        for key in choice["logprobs"]:
            assert [x for c in mine for x in c["logprobs"][key]] == choice["logprobs"][key]


def test_continuous_usage_grows(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client, prompt="hi", max_tokens=3, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]


def test_stream_options_need_stream(client):
    body = {"prompt": "hi", "stream_options": {"include_usage": True}}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "stream" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "text", "strict": True}),
        ("guided_json", "{}"),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("best_of", 3),
        ("tools", [{}]),
    ],
)
def test_features_that_are_not_there_are_refused_by_name(client, field, value):
    answer = client.post("/v1/completions", json={"prompt": "hi", field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert field in answer.json()["error"]["message"]


def test_unknown_and_harmless_fields_are_ignored(client):
    complete(client, prompt="hi", whatever={"a": [1]}, best_of=1, user="me", priority=0, n=2)
    complete(client, prompt="hi", response_format={"type": "text"}, request_id="x", tools=[])


def test_cache_salt_rules(client, engine):
    complete(client, prompt="hi", cache_salt="mine")
    assert engine.submitted[-1].salt == "@mine"
    for bad in ("", "a@b", "a/b", "a\\b", "a\0b", "a" * 129, 3):
        answer = client.post("/v1/completions", json={"prompt": "hi", "cache_salt": bad})
        assert answer.status_code == 400, bad
        error = answer.json()["error"]
        assert error["param"] == "cache_salt"
        assert bad == 3 or "none of them @, /, \\ or NUL" in error["message"]
