import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.acting_call import acting_call

ROWS = jax.ShapeDtypeStruct((3, 2), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def test_xla_is_told_of_the_effect_and_jax_is_not():
    call = acting_call("send", ROWS, input_output_aliases={0: 0})

    def program(x):
        return call(x, end=np.int64(7))

    x = jnp.zeros(ROWS.shape, ROWS.dtype)
    assert not jax.make_jaxpr(program)(x).effects
    text = jax.jit(program).lower(x).as_text()
    assert "stablehlo.custom_call @send" in text
    assert "has_side_effect = true" in text
    assert "output_operand_alias" in text
    assert "end = 7 : i64" in text


def test_one_result_comes_alone_and_several_as_a_list():
    x = jnp.zeros(ROWS.shape, ROWS.dtype)
    one = jax.eval_shape(acting_call("send", ROWS), x)
    several = jax.eval_shape(acting_call("send", [ROWS, COUNT]), x)
    assert (one.shape, one.dtype) == (ROWS.shape, ROWS.dtype)
    assert [(r.shape, r.dtype) for r in several] == [(ROWS.shape, ROWS.dtype), ((), jnp.int32)]


def test_two_calls_of_the_same_operands_are_two():
    call = acting_call("send", ROWS)
    x = jnp.zeros(ROWS.shape, ROWS.dtype)
    text = jax.jit(lambda x: call(x) + call(x)).lower(x).as_text()
    assert text.count("stablehlo.custom_call @send") == 2
