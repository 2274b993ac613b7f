"""The launches of one layer, found among those of a step."""

from bench.launch_order import Launch, layer_of, show_layer

NAMES = ("place_heads_kernel", "attention_kernel", "product", "product")


def step(layers: int, longer: float = 0.0) -> list[Launch]:
    """Return a step: something before the layers, four launches in each, a head behind them."""
    launches, at = [Launch("gather", 0.0, 5.0)], 10.0
    for layer in range(layers):
        for number, name in enumerate(NAMES):
            us = number + 1 + (longer if layer == 1 else 0)
            launches.append(Launch(name, at, us))
            at += us + 1  # a gap behind each
    return [*launches, Launch("head", at, 100.0)]


def test_a_layer_has_the_medians_of_all_but_the_last():
    layer, span = layer_of(step(5, longer=7.0))
    assert [launch.name for launch in layer] == list(NAMES)
    assert [launch.us for launch in layer] == [1, 2, 3, 4]
    assert [launch.begin for launch in layer] == [0, 2, 5, 9]
    assert span == 14  # kernels and the gaps behind them
    shown = show_layer(layer, span)
    assert shown.startswith("a layer: 14.0 us, 10.0 in its kernels")
    assert "attention_kernel" in shown


def test_a_layer_of_other_launches_does_not_count():
    launches = step(5)
    del launches[3]  # of the first layer
    layer, _ = layer_of(launches)
    assert [launch.name for launch in layer] == list(NAMES)


def test_a_step_without_layers_has_none():
    assert layer_of([]) == ([], 0.0)
    assert layer_of(step(2)) == ([], 0.0)
