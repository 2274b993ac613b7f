"""The schema of a text accepts its answers; only valid and right ones are counted."""

import jsonschema

from bench.schema_filling import counts, schema_of

ANSWERS = [
    {"intent": "Play", "slots": {"artist": "x"}},
    {"intent": "Stop", "slots": {"artist": ["x", "y"], "time": "now"}},
]


def test_a_schema_of_answers_accepts_them_and_no_others():
    is_valid = jsonschema.Draft202012Validator(schema_of(ANSWERS)).is_valid
    assert all(is_valid(answer) for answer in ANSWERS)
    assert is_valid({"intent": "Stop", "slots": {}})
    for other in ({"intent": "Other", "slots": {}}, {"intent": "Play"}, [], ANSWERS[0] | {"a": 1}):
        assert not is_valid(other)
    assert not is_valid({"intent": "Play", "slots": {"time": ["now"]}})


def test_valid_and_right_answers_are_counted():
    texts = ['{"intent": "Play", "slots": {}}', '{"intent": "Stop", "slots": {"what": "x"}}']
    texts += ['{"intent": "Stop", "slots": {}}', "{", "3"]
    references = [ANSWERS[0], ANSWERS[1], ANSWERS[0], ANSWERS[0], ANSWERS[0]]
    assert counts(texts, references, schema_of(ANSWERS)) == {"valid": 2, "right": 2}
