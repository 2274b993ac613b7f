import datetime
import threading

import pytest

from serving.text import chat_template
from serving.text.chat_template import MAX_TEMPLATE, ChatTemplate
from serving.text.template_sandbox import Meter

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": " hi "},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "bye"},
]


def test_chatml():
    template = ChatTemplate(CHATML, {})
    want = "<|im_start|>user\n hi <|im_end|>\n<|im_start|>assistant\n"
    assert template.render(TALK[:1]) == want
    assert template.render(TALK[:1], add_generation_prompt=False) == want[: want.rindex("<|im_s")]


def test_special_tokens_and_alternating_roles():
    template = ChatTemplate(STRICT, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TALK) == "<s>[INST] hi [/INST] yes</s>[INST] bye [/INST]"
    with pytest.raises(ValueError, match=r"refuses the messages: Roles must alternate\."):
        template.render(TALK[1:])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_content_is_a_text_or_parts_of_text(content, text):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"role": "user", "content": content}]) == text


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [5]}, "'int'"),
        ({"role": "user", "content": [{"type": "text"}]}, "'text' is not supported"),
        ({"content": "a"}, r"messages\.0\.role"),
        ({"role": 3, "content": "a"}, r"messages\.0\.role"),
    ],
)
def test_other_messages_are_refused_by_place(message, error):
    with pytest.raises(ValueError, match=error):
        ChatTemplate(CHATML, {}).render([message])


def test_a_message_is_data_and_never_a_template():
    text = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "{{ 7 * 7 }}{% x %}"}])
    assert "{{ 7 * 7 }}{% x %}" in text


def test_what_templates_expect_of_transformers():
    source = (
        "{{ strftime_now('%Y') }} {{ {'b': '<é>', 'a': 1} | tojson }} "
        "{{ [1] | tojson(indent=2) }} {{ tools is none }}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        " {{ ns.n }}"
    )
    year = str(datetime.datetime.now().year)
    got = ChatTemplate(source, {}).render(TALK)
    assert got == year + ' {"b": "<é>", "a": 1} [\n  1\n] True 3'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now('%Y' * 100) }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{{ namespace(a=1).__class__.__mro__ }}",
        "{{ [].append(1) }}",
        pytest.param(  # test_bounds.py has it while others wait
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            marks=pytest.mark.long,
            id="loops",
        ),
    ],
)
def test_a_template_that_fails_is_a_value_error_of_bounded_length(source):
    with pytest.raises(ValueError, match="chat template failed") as failed:
        ChatTemplate(source, {}).render(TALK, meter=Meter(max_seconds=0.2))
    assert len(str(failed.value)) <= 300


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{% endfor %}"])
def test_a_template_that_is_none_is_refused_when_it_is_read(source):
    with pytest.raises(ValueError, match="chat template is not valid"):
        ChatTemplate(source, {})


def test_a_huge_template_is_refused():
    with pytest.raises(ValueError, match=str(MAX_TEMPLATE + 1)):
        ChatTemplate("a" * (MAX_TEMPLATE + 1), {})


def test_every_rendering_has_a_meter_of_its_own():
    template = ChatTemplate(CHATML, {})
    with pytest.raises(ValueError, match="too many steps"):
        template.render(TALK, meter=Meter(max_steps=2))
    assert "bye" in template.render(TALK)


def test_renderings_share_an_environment_and_no_budget(monkeypatch):
    template, made = ChatTemplate(CHATML, {}), []
    monkeypatch.setattr(chat_template, "_environment", made.append)
    (idle,) = template._idle
    meter = vars(idle.environment)["meter"]
    text = template.render(TALK)
    meter._max_steps -= meter._steps  # enough for one such rendering, and no step more
    assert [template.render(TALK) for _ in range(3)] == [text] * 3
    assert meter._steps == 0
    assert made == []


def test_a_rendering_that_failed_leaves_no_environment():
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ValueError, match="chat template failed"):
        template.render([])
    assert not template._idle
    assert template.render([{"role": "user", "content": "a"}]) == "a"


def test_threads_share_a_template():
    template, texts = ChatTemplate(CHATML, {}), {}

    def work(name: str) -> None:
        for _ in range(20):
            texts[name] = template.render([{"role": name, "content": name * 100}])

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "abcd":
        assert texts[name] == template.render([{"role": name, "content": name * 100}])


THINKING = "{{ 'think ' if enable_thinking is not defined or enable_thinking }}" + CHATML


def test_a_request_s_variables_reach_the_template():
    template = ChatTemplate(THINKING, {})
    assert template.render(TALK[:1]).startswith("think <|im_start|>")
    plain = template.render(TALK[:1], variables={"enable_thinking": False})
    assert plain.startswith("<|im_start|>")


def test_variables_do_not_replace_the_server_s_own():
    template = ChatTemplate(STRICT, {"bos_token": "<s>", "eos_token": "</s>"})
    evil = {"bos_token": "x", "messages": [], "add_generation_prompt": True, "tools": [1]}
    assert template.render(TALK[:1], variables=evil) == template.render(TALK[:1])


def test_the_last_message_is_continued_where_its_text_ends():
    template = ChatTemplate(CHATML, {})
    got = template.render(TALK[:2], add_generation_prompt=False, continue_final_message=True)
    assert got.endswith("<|im_start|>assistant\nyes")
    strict = ChatTemplate(STRICT, {"bos_token": "<s>", "eos_token": "</s>"})
    # A template that trims shows less than was said.
    assert strict.render(TALK[:1], continue_final_message=True) == "<s>[INST] hi "
    for content in ("", "  ", None):
        with pytest.raises(ValueError, match="needs a last message with text"):
            template.render(
                [{"role": "assistant", "content": content}], continue_final_message=True
            )
    silent = ChatTemplate("-", {})
    with pytest.raises(ValueError, match="does not show the last message"):
        silent.render(TALK[:1], continue_final_message=True)
