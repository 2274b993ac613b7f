"""A body's structure: both fields, compiled off the event loop, every mistake named."""

import pytest

from serving.api.structured_outputs import StructuredOutputs
from serving.http.requests.protocol import ChatBody
from serving.http.requests.structure import after_thoughts, thinks_first

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(client, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
    return client.post("/v1/chat/completions", json=body)


def complete(client, **fields):
    return client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **fields})


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "structural_tag",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, "choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
    ],
)
def test_the_engine_gets_the_structure_and_its_grammar(client, engine, ask, fields, kind):
    assert ask(client, **fields).status_code == 200
    given = engine.submitted[-1]
    outputs = given.sampling.structured_outputs
    assert outputs.kind == kind
    assert given.grammar is engine.grammars[outputs.digest]


def test_nothing_asked_is_nothing_bound(client, engine):
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        assert chat(client, **fields).status_code == 200
        assert engine.submitted[-1].sampling.structured_outputs is None
        assert engine.submitted[-1].grammar is None


def of_schema(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of text"),
        ({"response_format": {}}, "response_format.type must be one of text"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema is not supported: send ",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be an object"),
        (of_schema(name="x"), "response_format.json_schema.schema must be an object"),
        (of_schema(schema={}, lenient=True), "response_format.json_schema.lenient"),
        (of_schema(schema={"not": {}}), 'response_format: Unimplemented keys: ["not"]'),
        ({"structured_outputs": {}}, "exactly one of json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "got regex and choice"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json: Unimplemented"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "exclude each other",
        ),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json is not supported"),
    ],
)
def test_mistakes_are_named_and_nothing_is_submitted(client, engine, fields, message):
    before = len(engine.submitted)
    for ask in (chat, complete):
        answer = ask(client, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["param"] in (*fields, "response_format")
    assert len(engine.submitted) == before


def test_a_pointer_into_the_schema_is_no_path_of_the_server(client, engine, monkeypatch):
    def refuse(outputs: object) -> None:
        raise ValueError("structured_outputs.json: Pointer '/nope' does not exist")

    monkeypatch.setattr(engine.grammars, "find", refuse)
    answer = chat(client, **of_schema(schema={"$ref": "#/nope"}))
    assert answer.json()["error"]["message"] == "response_format: Pointer '/nope' does not exist"


@pytest.mark.parametrize(
    ("parser", "prompt", "thoughts"),
    [
        ("qwen3", "assistant\n", "optional"),
        ("qwen3", "assistant\n<think>\n", "opened"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", ""),
        ("deepseek_r1", "assistant\n", "always"),
        ("deepseek_r1", "assistant\n<think>", "opened"),
        ("deepseek_r1", "</think>", ""),
    ],
)
def test_the_prompt_says_which_thoughts_come_before_a_structure(parser, prompt, thoughts):
    assert after_thoughts(StructuredOutputs(regex="a"), parser, prompt).thoughts == thoughts


def test_no_thoughts_without_a_parser_of_tags_or_when_they_are_not_wanted():
    body = ChatBody(messages=[])
    assert [thinks_first(body, p) for p in ("qwen3", "deepseek_r1", None, "openai_gptoss")] == [
        *(True, True),
        *(False, False),
    ]
    assert not thinks_first(ChatBody(messages=[], include_reasoning=False), "qwen3")
