"""Line of a log about quantised weights."""

from serving.engine.metrics.quantised_line import quantised_line


def test_a_line_counts_what_is_quantised_and_what_is_not():
    summary = {"parameters": 4_000_000, "other_parameters": 250_000, "format": "int4"}
    summary |= {"method": "gptq", "bits_per_parameter": 4.5}
    assert quantised_line(summary) == (
        "Quantised weights: 4.0 M in int4 (gptq), 4.50 bits each; 0.2 M others are not."
    )
