"""Orders of kernels travel between processes, and a process answers each."""

import dataclasses
import functools
import io
import pickle

import jax
import jax.numpy as jnp
import pytest

from lora_jax.ops import lowering
from lora_jax.ops.grouped_matmul.weights import ScaledWeight
from lora_jax.ops.lowering import KernelOrder, answer_all, pack_order, receive, send, unpack_order


@functools.partial(jax.jit, static_argnames="factor")
def scaled(x, weight, bias, factor):
    """Return a product of a weight in 8 bits."""
    y = x @ weight.values.astype(x.dtype).T * factor
    return y if bias is None else y + bias


def order(factor: float | str) -> KernelOrder:
    """Return an order whose arrays are of a registered dataclass, too."""
    shape = jax.ShapeDtypeStruct
    weight = ScaledWeight(
        shape((8, 4), jnp.int8), shape((8, 1), jnp.float32), (1, 4), jnp.dtype(jnp.float32)
    )
    leaves, tree = jax.tree.flatten((shape((2, 4), jnp.float32), weight, None))
    kinds = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return KernelOrder(scaled, tree, kinds, (factor,))


def test_an_order_comes_out_as_it_went_in():
    assert unpack_order(pack_order(order(2.0))) == order(2.0)


def test_a_function_that_cannot_be_imported_is_refused():
    local = dataclasses.replace(order(2.0), kernel=jax.jit(lambda x: x))
    with pytest.raises(ValueError, match="is no function of a module"):
        pack_order(local)


def test_messages_end_with_the_file():
    file = io.BytesIO()
    for message in (b"one", b""):
        send(file, message)
    whole = file.getvalue()
    file.seek(0)
    assert [receive(file) for _ in range(3)] == [b"one", b"", None]
    assert receive(io.BytesIO(whole[:-9])) is None  # within a message


def test_each_order_has_an_answer(monkeypatch):
    monkeypatch.setattr(lowering, "_PLATFORM", "cpu")
    orders, answers = io.BytesIO(), io.BytesIO()
    for factor in (2.0, "no number"):
        send(orders, pack_order(order(factor)))
    orders.seek(0)
    answer_all(orders, answers)
    answers.seek(0)
    code, error = (pickle.loads(receive(answers) or b"") for _ in range(2))
    assert receive(answers) is None
    x, values, scales = jnp.ones((2, 4)), jnp.ones((8, 4), jnp.int8), jnp.ones((8, 1))
    assert jnp.array_equal(code.call(x, values, scales), jnp.full((2, 8), 8.0))
    assert isinstance(error, str)
    assert "Error: " in error
