"""Layers and programs share what is traced and lowered; results are the kernel's own."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops import dispatch, lowered_once, lowering
from lora_jax.ops.lowered_once import call_lowered, in_layers, lowered_in
from lora_jax.ops.lowering_processes import LoweringProcesses


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let this process's programs be those of a GPU, which run here."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(lowering, "_PLATFORM", "cpu")


@pytest.fixture
def kernel():
    """Return a kernel of a pair of arrays and an optional one, and its traces."""
    traced = []

    @functools.partial(jax.jit, static_argnames="factor")
    def scaled(x, pair, bias, factor):
        traced.append(factor)
        y = (x + pair[0] * pair[1]) * factor
        return y if bias is None else y + bias

    return scaled, traced


@pytest.fixture
def made(monkeypatch):
    """Return a list with an entry for each kernel that is lowered."""
    made, export = [], lowering.export.export

    def counted(jitted, **options):
        made.append(options["platforms"])
        return export(jitted, **options)

    monkeypatch.setattr(lowering.export, "export", counted)
    return made


X = jnp.arange(4.0)


@pytest.mark.usefixtures("on_a_gpu")
def test_programs_share_one_lowered_kernel(kernel, made):
    scaled, _ = kernel

    def program(x, bias):
        for _ in range(3):  # layers
            x = call_lowered(scaled, (x, (x, x), bias), (2.0,), X)
        return x

    def direct(x, bias):
        for _ in range(3):
            x = scaled(x, (x, x), bias, factor=2.0)
        return x

    for other in range(2):
        x = X / 8 + other
        got = jax.jit(lambda x: program(x, None))(x)  # two programs: two functions
        np.testing.assert_array_equal(got, jax.jit(lambda x: direct(x, None))(x))
    assert len(made) == 1
    np.testing.assert_array_equal(jax.jit(program)(X / 8, X), jax.jit(direct)(X / 8, X))
    assert len(made) == 2  # a kernel with a bias is another one


def test_a_kernel_that_is_called_alone_is_a_program(kernel, made, on_a_gpu):
    scaled, _ = kernel
    got = call_lowered(scaled, (X, (X, X), None), (5.0,), X)
    np.testing.assert_array_equal(got, scaled(X, (X, X), None, factor=5.0))
    assert len(made) == 1


@pytest.mark.usefixtures("on_a_gpu")
def test_without_processes_a_kernel_is_lowered_where_it_is_traced(kernel, made):
    scaled, _ = kernel
    with LoweringProcesses(0) as none, lowered_in(none):
        jax.jit(lambda x: call_lowered(scaled, (x, (x, x), None), (6.0,), X)).trace(X)
    assert len(made) == 1


@pytest.mark.usefixtures("on_a_gpu")
def test_a_kernel_that_no_process_lowers_is_lowered_here(kernel, made, caplog):
    """The function is local to this test: no other process can import it."""
    scaled, _ = kernel
    with LoweringProcesses(1) as processes:
        with lowered_in(processes):
            traced = jax.jit(lambda x: call_lowered(scaled, (x, (x, x), None), (7.0,), X)).trace(X)
        assert not made  # a trace waits for no kernel
        compiled = traced.lower().compile()
    np.testing.assert_array_equal(compiled(X), scaled(X, (X, X), None, factor=7.0))
    assert len(made) == 1
    assert "A process did not lower" in caplog.text
    assert not processes._processes  # none was started for it


@pytest.mark.usefixtures("on_a_gpu")
def test_results_that_a_kernel_does_not_return_are_refused(kernel):
    scaled, _ = kernel
    with pytest.raises(TypeError, match=r"a kernel returns \[\(\(4,\), .*, not the results"):
        call_lowered(scaled, (X, (X, X), None), (8.0,), X[:2])


@pytest.mark.parametrize("elsewhere", ["on a CPU", "over devices"])
def test_a_kernel_is_called_as_it_is_elsewhere(kernel, made, monkeypatch, elsewhere):
    if elsewhere == "over devices":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        mesh = SimpleNamespace(empty=False)
        monkeypatch.setattr(lowered_once, "get_abstract_mesh", lambda: mesh)
    scaled, traced = kernel
    got = jax.jit(lambda x: call_lowered(scaled, (x, (x, x), None), (3.0,), X))(X)
    np.testing.assert_array_equal(got, scaled(X, (X, X), None, factor=3.0))
    assert (made, set(traced)) == ([], {3.0})


@pytest.mark.parametrize(("platform", "traces"), [("gpu", 1), ("cpu", 3)])
def test_equal_layers_of_a_gpu_s_program_are_traced_once(monkeypatch, platform, traces):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    traced = []

    @in_layers
    def layer(x, weights):
        """Return x times weights."""
        traced.append(x.shape)
        return x * weights

    def program(x):
        for _ in range(3):
            x = layer(x, weights=X)
        return x

    text = jax.jit(program).lower(X).as_text()
    assert (len(traced), text.count("call @layer")) == (traces, 3 if traces == 1 else 0)
    assert layer.__doc__ == "Return x times weights."


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_a_function_of_layers_calls_no_op(monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    double = dispatch.Implementation("xla", dispatch.ANY, lambda x: 2 * x)
    op = dispatch.Op("double", (double,))

    @in_layers
    def layer(x):
        return op.call(None, x) + 1

    with pytest.raises(TypeError, match="layer calls double; give it the op's results"):
        layer(X)
