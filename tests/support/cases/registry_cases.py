"""A registry of small adapters, and a clock for it."""

from pathlib import Path

from support.cases import adapter_cases as cases

from lora_jax.adapters.registry import (
    AdapterRegistry,
    RegistryLimits,
)


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_root(tmp_path: Path) -> Path:
    """An adapter directory with two adapters and a broken one; a secret one outside."""
    for seed, name in enumerate(("sql", "law")):
        cases.write_adapter(tmp_path / "root" / name, cases.dense_tensors(seed=seed))
    cases.write_adapter(tmp_path / "root" / "broken", cases.dense_tensors(rank=3))
    cases.write_adapter(tmp_path / "secret", cases.dense_tensors(seed=9))
    return tmp_path / "root"


def registry(root, keep=lambda weights: weights, **limits) -> AdapterRegistry:
    limits = RegistryLimits(**limits)
    return AdapterRegistry(
        cases.llama(), base_names=("base",), lora_dir=root, limits=limits, keep=keep
    )


def loaded(names: AdapterRegistry) -> list[str]:
    return [entry.name for entry in names.entries()]
