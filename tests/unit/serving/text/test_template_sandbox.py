import time

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from serving.text.template_sandbox import BoundedEnvironment, Meter, TemplateLimit

DOUBLE = "{% set ns = namespace(a='ab') %}{% for i in range(60) %}"
NEST = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
MILLION = "{% set a = 'a' * 1000000 %}"


def render(source: str, meter: Meter | None = None, **values) -> str:
    code = BoundedEnvironment(Meter()).compile_source(source)
    environment = BoundedEnvironment(meter or Meter())
    template = jinja2.Template.from_code(environment, code, environment.globals)
    return template.render(**values)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in [1, 2, 3] %}{{ loop.index }}{% endfor %}", "123"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) ~ m('a') }}", "<1><a>"),
        ("{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"),
        (
            "{{ 'a' + 'b' }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 % 4 }}",
            "ababab[1, 2]10243",
        ),
        ("{{ 'abab'.replace('a', 'x', 1) }}{{ 'abab' | replace('b', '') }}", "xbabaa"),
        (
            "{% for x in ['aba'] %}{{ x.replace('a', 'c') }}{{ x.join('12') }}{% endfor %}",
            "cbc1aba2",
        ),
        ("{{ ', '.join(['a', 'b']) }}{{ [{'k': 1}] | join('-', attribute='k') }}", "a, b1"),
        ("{{ 'a\nb' | indent(2) }}{{ [1, 'x'] | string }}", "a\n  b[1, 'x']"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{{ absent }}{{ absent is defined }}", "False"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
    ],
)
def test_what_templates_do_works(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [1] * 100000000 }}",
        DOUBLE + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        DOUBLE + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
        DOUBLE + "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}",
        DOUBLE + "{% set ns.a = ns.a.replace('a', ns.a) %}{% endfor %}",
        DOUBLE + "{% set ns.a = ns.a | replace('a', ns.a) %}{% endfor %}",
        DOUBLE + "{% set ns.a = ns.a.join(ns.a) %}{% endfor %}",
        DOUBLE + "{% set ns.a = [ns.a, ns.a] | join(ns.a) %}{% endfor %}",
        NEST + "{% endfor %}{{ ns.a }}",
        NEST + "{% endfor %}{{ ns.a | string | length }}",
        NEST + "{% endfor %}{{ ns.a ~ '' }}",
        MILLION + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
        "{% set ns.l = ns.l + [a + 'b'] %}{% endfor %}",
        MILLION + "{% for i in range(99999) %}{{ a }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_what_grows_or_runs_on_is_ended(source):
    start = time.monotonic()
    with pytest.raises(TemplateLimit):
        render(source, Meter(max_seconds=0.1))
    assert time.monotonic() - start < 20


def test_steps_and_seconds_are_counted_apart():
    loop = "{% for i in range(1000) %}{% endfor %}"
    with pytest.raises(TemplateLimit, match="too many steps"):
        render(loop, Meter(max_steps=500))
    with pytest.raises(TemplateLimit, match="too long"):
        render(loop, Meter(max_seconds=0.0))
    assert render(loop) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ ('a' | attr('zfill'))(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 10 ** 1000 }}",
        "{{ 10 ** 20 * 10 ** 20 }}",
        "{{ 'a' | indent(999999999) }}",
    ],
)
def test_what_reaches_out_is_refused(source):
    with pytest.raises(SecurityError):
        render(source, messages=[])


@pytest.mark.parametrize("name", ["center", "format", "wordwrap", "urlize"])
def test_filters_that_only_harm_are_not_there(name):
    with pytest.raises(jinja2.TemplateError, match=name):
        render(f"{{{{ 'a' | {name}(9) }}}}")


def test_there_are_no_other_templates():
    with pytest.raises(TypeError, match="no loader"):
        render("{% include 'secret' %}")
    assert render("{{ lipsum is defined }}") == "False"
