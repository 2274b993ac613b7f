"""Merged metrics can be read as one text, and lose nothing."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.cluster.metrics import merge, role_lines


def text_of(count: int) -> str:
    registry = CollectorRegistry()
    Counter("asked", 'A "counter"\nof two lines', ["model"], registry=registry).labels(
        'odd "name"\\\n'
    ).inc(count)
    Gauge("running", "Now", registry=registry).set(float("inf"))
    Histogram("seconds", "Time", buckets=(0.1, 1), registry=registry).observe(0.5)
    return generate_latest(registry).decode()


def test_every_sample_says_whose_it_is():
    merged = merge({"0": text_of(3), "1": text_of(4)})
    families = list(text_string_to_metric_families(merged))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family is in two places"
    found = {
        (sample.name, sample.labels["engine"], sample.labels.get("le")): sample
        for family in families
        for sample in family.samples
    }
    assert [found["asked_total", n, None].value for n in "01"] == [3.0, 4.0]
    assert found["asked_total", "0", None].labels["model"] == 'odd "name"\\\n'
    assert found["running", "1", None].value == float("inf")
    assert found["seconds_bucket", "1", "1.0"].value == 1.0
    single = list(text_string_to_metric_families(text_of(3)))
    assert {family.name: family.type for family in families} == {f.name: f.type for f in single}
    assert len(found) == 2 * sum(len(family.samples) for family in single)


def test_a_label_of_a_function_stays_behind_its_instance():
    registry = CollectorRegistry()
    Gauge("running", "Now", ["engine"], registry=registry).labels("law").set(1)
    text = generate_latest(registry).decode()
    merged = list(text_string_to_metric_families(merge({"0": text, "1": text})))
    assert [s.labels["engine"] for s in merged[0].samples] == ["0/law", "1/law"]


def test_nothing_is_nothing():
    assert merge({}) == ""


def test_the_label_engine_of_an_instance_is_replaced_not_doubled():
    text = '# TYPE vllm:running gauge\nvllm:running{model_name="m",engine="0"} 1.0\n'
    lines = merge({"0": text, "1": text}).splitlines()
    assert [line.split("{")[1] for line in lines[2:]] == [
        'model_name="m",engine="0"} 1.0',
        'model_name="m",engine="1"} 1.0',
    ]


def test_a_gauge_says_which_roles_are_up():
    (family,) = text_string_to_metric_families(role_lines({"instances": [True, False]}))
    assert [(s.labels["role"], s.labels["number"], s.value) for s in family.samples] == [
        ("instance", "0", 1.0),
        ("instance", "1", 0.0),
    ]
