"""The record of dispatch: each outcome once, bounded, by op."""

from lora_jax.ops.choices import Choice, Choices


def test_an_outcome_is_new_once_for_each_op():
    choices = Choices()
    slow = Choice("xla", {"cuda": "takes bfloat16, not float32"})
    assert choices.add("merge", slow)
    assert not choices.add("merge", slow)
    assert choices.add("reroute", slow)
    assert choices.add("merge", Choice("cuda", {}))
    assert choices.table() == {
        "merge": [
            {"implementation": "xla", "declined": {"cuda": "takes bfloat16, not float32"}},
            {"implementation": "cuda", "declined": {}},
        ],
        "reroute": [{"implementation": "xla", "declined": {"cuda": "takes bfloat16, not float32"}}],
    }


def test_outcomes_of_many_shapes_are_bounded():
    choices = Choices()
    added = [choices.add("op", Choice("xla", {"cuda": f"not {n} rows"})) for n in range(100)]
    assert sum(added) == len(choices.table()["op"]) == Choices.LIMIT
