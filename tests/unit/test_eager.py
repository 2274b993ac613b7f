import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from support.processes import eager


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


CASES = {
    "an array": lambda: jnp.asarray(random(3, 5)),
    "a float": lambda: jnp.asarray(3.5),
    "an integer": lambda: jnp.asarray(3),
    "a list": lambda: jnp.asarray([[1.5, 2.0], [3.0, 4.0]], jnp.bfloat16),
    "64 bits": lambda: jnp.asarray(np.arange(4, dtype=np.int64)),
    "filled": lambda: jnp.full((2, 3), True),
    "none": lambda: jnp.zeros((0, 3)),
    "a range": lambda: jnp.arange(7),
    "rounded": lambda: jnp.asarray(random(7, 5)).astype(jnp.bfloat16),
    "to a float": lambda: jnp.arange(-5, 5).astype(jnp.float32),
    "to an integer": lambda: (jnp.asarray(random(3)) * 9).astype(jnp.int32),
    "steps": lambda: jnp.asarray(random(7, 6))[2:5, ::2],
    "the last": lambda: jnp.asarray(random(7, 7))[-1],
    "one of floats": lambda: jax.lax.dynamic_slice(jnp.asarray(random(6)), (5,), (3,)),
    "past the end": lambda: jax.lax.dynamic_slice(jnp.arange(6), (5,), (3,)),
    "turned": lambda: jnp.asarray(random(7, 8)).T.reshape(8, 7, 1),
    "joined": lambda: jnp.concatenate([jnp.arange(3), jnp.arange(2)]),
    "of a device": lambda: jax.device_put(random(6), jax.devices()[1]).reshape(2, 3)[1],
    "weak": lambda: jnp.broadcast_to(jnp.asarray(2.0), (2,)),
}


def described(array: jax.Array) -> tuple:
    """Return everything by which a later operation could tell two arrays apart."""
    form = (array.shape, array.dtype, array.weak_type, array.committed, array.sharding)
    return (*form, np.asarray(array).tobytes())


def test_arrays_are_those_of_jax_and_may_be_donated(monkeypatch):
    monkeypatch.setattr(dispatch, "xla_primitive_callable", eager.JAX_S_OWN)
    want = {name: described(make()) for name, make in CASES.items()}
    monkeypatch.setattr(dispatch, "xla_primitive_callable", None)
    eager.install()
    for name, make in CASES.items():
        assert described(make()) == want[name], name
        kept = make()
        jax.jit(lambda x: x, donate_argnums=0)(kept)
        assert kept.is_deleted() or not kept.size, name


def test_programs_take_over_after_some_calls(monkeypatch):
    compiled = []
    monkeypatch.setattr(dispatch, "xla_primitive_callable", None)
    monkeypatch.setattr(eager, "JAX_S_OWN", lambda primitive, **_: compiled.append)
    monkeypatch.setattr(eager, "_CALLS", 2)
    eager.install()
    host = random(3, 5)
    made = [jax.lax.stage(host) for _ in range(4)]
    assert [array is None for array in made] == [False, False, True, True]
    assert len(compiled) == 2
