"""Assignment of adapters to LLM instances (InfiniLoRA, section 6.1). No jax."""

from collections.abc import Mapping


def assign(load_of: Mapping[str, float], instances: int) -> dict[str, int]:
    """Return the instance of every adapter: heaviest first, each to the least loaded instance.

    `load_of` is any additive load, e.g. requests per second times output tokens. The largest
    instance's load is at most 4/3 - 1/(3 * instances) of the best possible (Graham 1969). Equal
    loads go by name, equal instances by their number of adapters, then by number, so that the
    result does not depend on the order of `load_of`. Raises ValueError for a load that is
    negative or not finite, and for no instance.
    """
    if instances < 1:
        raise ValueError(f"Adapters need at least one instance, got {instances}.")
    for name, load in load_of.items():
        if not 0 <= load < float("inf"):
            raise ValueError(f"The load of adapter {name!r} must be 0 or more, got {load}.")
    totals = [(0.0, 0, instance) for instance in range(instances)]
    instance_of: dict[str, int] = {}
    for name in sorted(load_of, key=lambda name: (-load_of[name], name)):
        total, count, instance = min(totals)
        instance_of[name] = instance
        totals[instance] = (total + load_of[name], count + 1, instance)
    return instance_of


def loads(load_of: Mapping[str, float], instance_of: Mapping[str, int], instances: int):
    """Return the summed load of every instance, as a tuple of floats."""
    totals = [0.0] * instances
    for name, instance in instance_of.items():
        totals[instance] += load_of[name]
    return tuple(totals)
