"""A rollout of the adapter `sql`, and the versions that it gives its callers."""

from pathlib import Path

from support.doubles.fake_engine import FakeRegistry, write_fake_adapters


def fake_registry(root: Path) -> FakeRegistry:
    """Return a registry with three versions of one adapter."""
    registry = FakeRegistry(write_fake_adapters(root, "one", "two", "three"))
    for version, folder in {"v1": "one", "v2": "two", "v3": "three"}.items():
        registry.load(f"sql@{version}", folder)
    return registry


def picks(rollouts, count=400):
    return {rollouts.pick("sql", f"user-{n}") for n in range(count)}


def shares(rollouts):
    return {v: n / 100 for v, n in rollouts.state("sql").now.buckets.items() if n}
