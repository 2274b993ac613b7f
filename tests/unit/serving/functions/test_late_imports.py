"""Imports beside a start: their order, their errors, and what is left out of them."""

import importlib.metadata
import subprocess
import sys
from types import ModuleType

import pytest

from serving.functions import late_imports
from serving.functions.late_imports import LateImports, lean


def test_missing_modules_are_imported_in_order_and_errors_come_where_they_are_needed(monkeypatch):
    imported = []

    def import_module(name):
        imported.append(name)
        if name == "wrong":
            raise ValueError("a fault in it")
        return ModuleType(name)

    monkeypatch.setattr(late_imports.importlib, "import_module", import_module)
    late = LateImports(["sys", "b", "wrong", "a"])
    assert late.get("a").__name__ == "a"
    with pytest.raises(ValueError, match="a fault in it"):
        late.get("wrong")
    assert imported == ["b", "wrong", "a"]


def test_without_missing_modules_there_is_no_thread(monkeypatch):
    monkeypatch.setattr(late_imports.threading, "Thread", None)
    assert LateImports(["sys"]).get("sys") is sys


def test_notebooks_and_far_files_are_left_out_while_a_start_imports(monkeypatch):
    for name in ("IPython", "etils.epath"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with lean():
        for name in ("IPython", "etils.epath"):
            with pytest.raises(ImportError):
                importlib.import_module(name)
    assert not {"IPython", "etils.epath"} & sys.modules.keys()


def test_what_is_there_already_stays(monkeypatch):
    there = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", there)
    with lean():
        assert sys.modules["IPython"] is there
    assert sys.modules["IPython"] is there


def test_programs_in_a_far_folder_keep_what_reads_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "etils.epath", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/programs")
    with lean():
        assert "etils.epath" not in sys.modules


def test_only_the_import_of_jax_finds_no_packages(monkeypatch):
    before = importlib.metadata.distributions
    with lean():  # jax is here
        assert importlib.metadata.distributions is before
    monkeypatch.delitem(sys.modules, "jax")
    with lean():
        assert not list(importlib.metadata.distributions())
    assert importlib.metadata.distributions is before


# What flax is for functions, and what it could do for others, in a process that imported it leanly.
LEAN = """
import sys
from serving.functions.late_imports import lean
with lean():
    from flax import nnx
assert not {"optax", "treescope", "rich"} & sys.modules.keys(), "imported, or left behind"
import jax.numpy as jnp
class Model(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(3))
    def __call__(self):
        return self.weight + 1
model = Model()
graphdef, state = nnx.split(model, graph=False)
assert nnx.merge(graphdef, state).weight.shape == (3,)
assert not {"optax", "treescope", "rich"} & sys.modules.keys(), "a split needs none of them"
import optax
optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
optimizer.update(model, nnx.grad(lambda m: m.weight.sum())(model))
assert model.weight[0] == 0.5
assert "Model" in nnx.tabulate(model)
nnx.display(model)
"""


def test_what_flax_shows_and_trains_with_is_imported_by_its_first_use():
    subprocess.run([sys.executable, "-c", LEAN], check=True, stdout=subprocess.DEVNULL, timeout=120)
