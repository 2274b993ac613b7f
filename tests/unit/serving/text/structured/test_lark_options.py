"""Options inside of a client's Lark grammar loosen nothing, and none is passed over."""

import time

import pytest

from serving.text.structured.lark_options import checked_lark

OPTIONS = {"lenient": False, "whitespace_pattern": " "}
OURS = '"x-guidance": {"lenient": false, "whitespace_pattern": " "}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance 'no_forcing': false is"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "'allow_invalid_utf8': true is"),
        ('start: "a"\n%llguidance{"maximum": ["x"]}', "'maximum': [\"x\"] is"),
        ('%llguidance yes\nstart: "a"', "%llguidance without JSON is"),
        ("start: %json", "%json without JSON is"),
        ("start: %json " + "[" * 60_000, "%json without JSON is"),
        ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', "x-guidance.lenient is"),
        ('start: %json\n{"x-guidance": {"coerce_one_of": true}}', "x-guidance.coerce_one_of is"),
        (
            'start: %json {"\\u0078-guidance": {"item_separator": ";"}}',
            "x-guidance.item_separator is",
        ),
        ('start: "x" %lark {\nstart: %json {"x-guidance": {"lenient": true}}\n}', "lenient is"),
        ('start: %json {"x-guidance": 3}', "x-guidance that is no object is"),
        ("start: a\na[max_tokens=3, temperature = 0.3]: /x*/", "The attribute temperature is"),
    ],
)
def test_what_loosens_or_is_passed_over_is_refused_by_name(text, named):
    with pytest.raises(ValueError, match=r"^structured_outputs\.grammar: ") as caught:
        checked_lark(text, OPTIONS)
    assert f"{named} not supported; " in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "%llguidance {}\nstart: temperature\ntemperature: /[0-9]+/",
        '%llguidance {"allow_initial_skip": true, "no_forcing": true}\nstart: "a"',
        'start: "%json { %llguidance [temperature=1]" // %json\n# %llguidance\n',
        r'start: "\"%json" /[\/"] %json [temperature=1]/',
        "start: %json true",
    ],
)
def test_the_rest_stays_as_it_is(text):
    assert checked_lark(text, OPTIONS) == text


def test_schemas_within_a_grammar_have_the_options_of_json_but_for_their_own_spaces():
    own = '{"type": "null", "x-guidance": {"whitespace_pattern": "x"}}'
    text = f'start: %json {{ }} | b\nb: %json{{"const": 1e3}} | "{{" | %json {own} // {{}}'
    both = OURS.replace('" "', '"x"')
    assert checked_lark(text, OPTIONS) == (
        f'start: %json {{{OURS}}} | b\nb: %json{{"const": 1000.0, {OURS}}} | "{{" | '
        f'%json {{"type": "null", {both}}} // {{}}'
    )
    assert '"pattern": "^' in checked_lark('start: %json {"format": "date"}', OPTIONS)


@pytest.mark.parametrize("text", ["/" + r"\/" * 30_000, '"' + r"\"" * 30_000])
def test_a_text_without_its_end_takes_no_quadratic_time(text):
    begun_s = time.process_time()
    assert checked_lark(text, OPTIONS) == text  # llguidance refuses it
    assert time.process_time() - begun_s < 2.0
