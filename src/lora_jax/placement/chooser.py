"""Choice of x and y of EPx-PPy for a number of devices (InfiniLoRA, end of section 4.1)."""

from collections.abc import Mapping

from lora_jax.placement.ep_pp import ServerLayout, hybrid, possible_degrees
from lora_jax.placement.shape import AdapterShape


def default_placement(shape: AdapterShape, devices: int, devices_per_host: int) -> ServerLayout:
    """Return EPx-PPy with x as near below the devices of one host as the sizes allow.

    The paper's default is x = devices in a host, so that a layer's group talks over NVLink only.
    Raises ValueError if no x fits into a host.
    """
    pairs = _some_degrees(shape, devices)
    inside = [(x, y) for x, y in pairs if x <= devices_per_host]
    if not inside:
        raise ValueError(
            f"No group of at most {devices_per_host} devices per layer is possible on {devices} "
            f"devices with {shape.layers} layers of {shape.experts} experts; the smallest is "
            f"{pairs[0][0]}. Use fewer devices."
        )
    return hybrid(shape, *inside[-1], devices)


def cheapest_placement(
    shape: AdapterShape, devices: int, seconds_per_layer: Mapping[int, float]
) -> ServerLayout:
    """Return the EPx-PPy whose measured time per layer is least; the larger x of equal ones.

    `seconds_per_layer` maps x to receive + LoRA + send of one layer, which depends on x alone:
    the other stages have no part in a layer. Raises ValueError if no possible x was measured.
    """
    pairs = _some_degrees(shape, devices)
    measured = [(x, y) for x, y in pairs if x in seconds_per_layer]
    if not measured:
        raise ValueError(
            f"No measured time for {devices} devices: possible x are "
            f"{', '.join(str(x) for x, _ in pairs)}, measured are "
            f"{', '.join(map(str, sorted(seconds_per_layer)))}."
        )
    best = min(measured, key=lambda pair: (seconds_per_layer[pair[0]], -pair[0]))
    return hybrid(shape, *best, devices)


def _some_degrees(shape: AdapterShape, devices: int) -> list[tuple[int, int]]:
    pairs = possible_degrees(shape, devices)
    if not pairs:
        raise ValueError(
            f"{devices} devices cannot share {shape.layers} layers of {shape.experts} experts "
            "evenly: no x with x * y = devices divides the experts and leaves y at most the "
            "layers; use another number of devices."
        )
    return pairs
