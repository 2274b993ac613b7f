"""Quantised weights in the Mosaic GPU kernel: interpreted, its threads' bytes, bits on a GPU.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.ops.test_grouped_matmul_weights import coded, scaled
from support.doubles.mosaic import interpreted
from support.drivers.lowering import launches
from support.oracles.tolerance import TOLERANCE

from lora_jax.models.quantised.forms import E2M1, NF4, SIGNED
from lora_jax.ops.cases import grouped_case
from lora_jax.ops.grouped_matmul import CodedWeight, _gpu_codes, composed, pallas_gpu, reference
from lora_jax.ops.grouped_matmul._gpu_codes import Decoding
from lora_jax.ops.grouped_matmul._gpu_tiles import GroupedMatmulConfig, find_quantised
from lora_jax.ops.grouped_matmul._gpu_weights import form_of
from lora_jax.ops.grouped_matmul.orders import for_kernels
from lora_jax.ops.grouped_matmul.weights import FRAGMENTS, ROWS, ScaledWeight

GROUPS, D_OUT, D_IN = 2, 128, 320  # stages of 64
LONG_D_IN = 384  # stages of 128


def wide(array) -> np.ndarray:
    """Return bfloat16 as float32, which is exact."""
    return np.asarray(array, np.float32)


def weight(kind: str, sizes=(GROUPS, D_OUT, D_IN)):
    """Return a random weight of a kind and the array that it stands for."""
    bf16 = "bfloat16"
    match kind:
        case "blocks":
            return scaled(*sizes, block=(1, 128), dtype=bf16)
        case "channels":
            return scaled(*sizes, block=(1, sizes[2]), dtype=bf16)
        case "zeros":
            return coded(*sizes, group=32, dtype=bf16, zeros=True)
        case "table":
            return coded(*sizes, group=64, dtype=bf16)
    w, _ = coded(*sizes, group=32, dtype=bf16, scales=bf16)
    tables = {"integers": SIGNED, "e2m1": E2M1, "nf4": NF4}
    w = CodedWeight(w.codes, w.scales, None, tables[kind], w.dtype)
    return w, np.asarray(jax.jit(CodedWeight.plain)(w))


def config_for(w) -> GroupedMatmulConfig:
    """Return tiles of two warpgroups and two stages."""
    form = form_of("grouped_matmul", w)
    return GroupedMatmulConfig(64, 2, 16, 2, 1, step=form.step, bits=form.bits)


LONG = [
    pytest.param(kind, marks=pytest.mark.long) for kind in ("channels", "zeros", "table", "e2m1")
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["blocks", *LONG])
def test_interpreted_matches_the_reference(kind):
    d_in = LONG_D_IN if kind in ("blocks", "zeros") else D_IN
    w, plain = weight(kind, (GROUPS, D_OUT, d_in))
    case = grouped_case(21, GROUPS, D_OUT, d_in, dtype="bfloat16", bias=True)
    arrays = (case.group_sizes, case.bias)
    with interpreted() as interpret:
        call = functools.partial(pallas_gpu.grouped_matmul, config=config_for(w))
        got = call(case.x, w, *arrays, interpret=interpret).block_until_ready()
    want = jax.jit(reference.grouped_matmul)(case.x, jnp.asarray(plain), *arrays)
    np.testing.assert_allclose(wide(got), wide(want), **TOLERANCE["bfloat16"])


@pytest.mark.long
def test_interpreted_gate_and_up_in_one_launch():
    (gate, plain_gate), (up, plain_up) = weight("blocks"), weight("blocks")
    up, plain_up = up[::-1], plain_up[::-1]
    case = grouped_case(21, GROUPS, D_OUT, D_IN, dtype="bfloat16")
    with interpreted() as interpret:
        call = functools.partial(pallas_gpu.gated_matmul, config=config_for(gate))
        got = call(case.x, gate, up, case.group_sizes, interpret=interpret).block_until_ready()
    call = functools.partial(composed.gated_matmul, reference.grouped_matmul)
    plain = (jnp.asarray(plain_gate), jnp.asarray(plain_up))
    want = jax.jit(call)(case.x, *plain, case.group_sizes)
    np.testing.assert_allclose(wide(got), wide(want), **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("kind", ["integers", "nf4"])
def test_codes_in_fragments_are_decoded_to_the_same_weights(kind):
    w, plain = weight(kind, (1, D_OUT, 64))
    moved, scales = for_kernels(w, "gpu"), np.asarray(w.scales[0], np.float32)
    decoding = Decoding(w.table, w.group_size, narrow=True, zeros=False, order=moved.order)
    columns = tuple(jnp.asarray(column) for column in scales.T)
    made = _gpu_codes.interpreted(moved.codes[0], columns, decoding=decoding)
    np.testing.assert_array_equal(wide(made), wide(plain[0]))


def coded_shapes(table, order: str, group: int = 32, scales="bfloat16", zeros: bool = False):
    """Return the shapes of a weight of 64 x 64 codes for each of two groups."""
    shape, by_group = jax.ShapeDtypeStruct, (GROUPS, 64, 64 // group)
    codes = shape((GROUPS, 64, 32), jnp.uint8)
    points = shape(by_group, jnp.uint8) if zeros else None
    scaled_by = shape(by_group, jnp.dtype(scales))
    return CodedWeight(codes, scaled_by, points, table, jnp.bfloat16, order)


UNEVEN = tuple(float(i * i) for i in range(16))
# What a pair of weights costs in registers, and whether threads exchange bytes.
DECODED = {
    "integers": (coded_shapes(SIGNED, ROWS), "sub.rn.bf16x2", True),
    "integers in fragments": (coded_shapes(SIGNED, FRAGMENTS), "sub.rn.bf16x2", False),
    "zeros": (coded_shapes(SIGNED, ROWS, zeros=True, scales="float32"), "mul.rn.f32 low", True),
    "e2m1": (coded_shapes(E2M1, FRAGMENTS), "0x7e807e80", False),
    "table": (coded_shapes(UNEVEN, ROWS, 64, "float32"), "cvt.rn.bf16x2", True),
    "table in fragments": (coded_shapes(NF4, FRAGMENTS, 64), "shfl.sync.idx.b32 low", False),
}


def lowered(w, *more, op=pallas_gpu.grouped_matmul):
    """Return the launch of a product of 16 rows by a weight, by tiles of 64 x 16."""
    x, sizes = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((GROUPS,), "i4")
    form = form_of("grouped_matmul", w)
    config = GroupedMatmulConfig(64, 1, 16, 2, 1, step=form.step, bits=form.bits)
    arrays = (x, w, w, sizes) if op is pallas_gpu.gated_matmul else (x, w, sizes, None)
    (launch,) = launches(functools.partial(op, config=config, interpret=False), *arrays)
    return launch


@pytest.mark.parametrize("name", DECODED)
def test_lowered_codes_become_pairs_in_registers(name):
    """A thread of 128 makes 16 pairs of 64 x 64 weights; it turns 4 words if they are in rows."""
    w, operation, exchanged = DECODED[name]
    launch = lowered(w)
    assert launch.assembly.count(operation) == 16
    assert launch.assembly.count("shfl.sync.bfly.b32 other, $1, 2") == 4 * exchanged
    assert launch.assembly.count("wgmma.mma_async") == 4


def test_lowered_eight_bits_are_multiplied_in_float32():
    values = jax.ShapeDtypeStruct((GROUPS, 64, 64), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((GROUPS, 64, 1), jnp.float32)
    w = ScaledWeight(values, scales, (1, 64), jnp.bfloat16)
    one, two = lowered(w), lowered(w, op=pallas_gpu.gated_matmul)
    assert two.assembly.count("wgmma.mma_async") == 2 * one.assembly.count("wgmma.mma_async") == 8
    assert two.shared_bytes > one.shared_bytes
    assert one.operations["mulf"] == 16  # of a thread's 32 weights, in pairs


def test_declines_zero_points_beside_other_tables():
    with pytest.raises(NotImplementedError, match="zero points beside integers only"):
        form_of("grouped_matmul", coded_shapes(UNEVEN, ROWS, zeros=True))


def permuted(own: np.ndarray, other: np.ndarray, selector: int) -> np.ndarray:
    """Return what PTX's prmt makes of four bytes of a thread and four of another."""
    both = np.concatenate([own, other])
    return both[[selector >> 4 * i & 7 for i in range(4)]]


def test_two_exchanges_transpose_the_bytes_of_four_threads():
    """As `_gpu_codes` has them: selectors by the second bit of the thread, then by the first."""
    threads = np.arange(16).reshape(4, 4)
    for distance, selectors in ((2, (0x5410, 0x3276)), (1, (0x6240, 0x3715))):
        threads = np.stack(
            [
                permuted(own, threads[t ^ distance], selectors[bool(t & distance)])
                for t, own in enumerate(threads)
            ]
        )
    np.testing.assert_array_equal(threads, np.arange(16).reshape(4, 4).T)


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-3])
def test_few_bits_times_a_bfloat16_are_rounded_once(scale):
    """Why scales in bfloat16 are multiplied in it: float32 in between changes no bit."""
    scale = jnp.bfloat16(scale)
    for values in (np.arange(-31, 32), np.array(E2M1)):
        few = np.asarray(values, np.float64)
        once = (few * float(scale)).astype(jnp.bfloat16)
        twice = (np.float32(few) * np.float32(scale)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(once, twice)


def test_tables_are_known_by_their_values():
    decoding = functools.partial(Decoding, group=32, narrow=True, zeros=False)
    assert [decoding(table).first_integer for table in (SIGNED, NF4, E2M1)] == [-8, None, None]
    assert [decoding(table).e2m1 for table in (SIGNED, NF4, E2M1)] == [False, False, True]


@pytest.mark.parametrize(
    ("w", "why"),
    [
        (lambda: scaled(1, 64, 128, block=(128, 128), dtype="bfloat16")[0], "scales of one row"),
        (
            lambda: scaled(1, 64, 128, block=(1, 64), dtype="bfloat16")[0],
            "multiples of 128 columns",
        ),
        (lambda: coded(1, 64, 128, group=16, dtype="bfloat16")[0], "no groups of 16"),
        (lambda: weight("blocks", (1, 32, 128))[0], "quantised weights in steps of 64, not 32"),
    ],
)
def test_declines_what_it_cannot_serve(w, why):
    w = w()
    case = grouped_case(4, *w.shape, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match=why):
        pallas_gpu.grouped_matmul(case.x, w, case.group_sizes, None, interpret=False)


def test_declines_two_forms_in_one_launch():
    gate, (up, _) = jnp.zeros((1, 64, 128), jnp.bfloat16), weight("blocks", (1, 64, 128))
    case = grouped_case(4, 1, 64, 128, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="two weights of one form"):
        pallas_gpu.gated_matmul(case.x, gate, up, case.group_sizes, interpret=False)


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 64, 512, 4096, 65536])
@pytest.mark.parametrize("groups", [1, 8, 128])
@pytest.mark.parametrize("d_out", [64, 768, 2880, 14336])
def test_tiles_fill_the_width_and_fit(d_out, groups, rows, matrices):
    for bits in (4, 8):
        config = find_quantised(rows, groups, d_out, matrices, bits, 128)
        assert d_out % (config.columns * config.warpgroups) == 0
        assert config.stages >= 3
        assert matrices * config.columns * config.rows // 128 <= 96


KINDS = ("blocks", "channels", "integers", "zeros", "e2m1", "nf4", "table")
REAL = [
    (1, 128, 768, 2048),
    (64, 1, 4096, 2048),
    (512, 128, 2048, 768),
    (64, 4, 2880, 2880),
    (2048, 8, 1024, 4096),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_on_a_gpu_products_have_the_bits_of_the_plain_array(sizes, kind):
    rows, *shape = sizes
    w, plain = weight(kind, tuple(shape))
    case = grouped_case(rows, *shape, dtype="bfloat16")
    call = jax.jit(pallas_gpu.grouped_matmul)
    got = call(case.x, w, case.group_sizes, None)
    want = call(case.x, jnp.asarray(plain), case.group_sizes, None)
    np.testing.assert_array_equal(wide(got), wide(want))
    alone = call(case.x[:1], w, jnp.zeros(shape[0], jnp.int32).at[first(case)].set(1), None)
    np.testing.assert_array_equal(wide(alone)[0], wide(got)[0])


def first(case) -> int:
    """Return the first group that has rows."""
    return int(np.flatnonzero(np.asarray(case.group_sizes))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [64, 512])
def test_on_a_gpu_gate_and_up_have_the_bits_of_the_plain_arrays(rows, kind):
    shape = (64, 768, 2048)
    (gate, plain_gate), (up, plain_up) = weight(kind, shape), weight(kind, shape)
    up, plain_up = up[::-1], plain_up[::-1]
    case = grouped_case(rows, *shape, dtype="bfloat16")
    call = jax.jit(pallas_gpu.gated_matmul)
    got = call(case.x, gate, up, case.group_sizes)
    plain = (jnp.asarray(plain_gate), jnp.asarray(plain_up))
    np.testing.assert_array_equal(wide(got), wide(call(case.x, *plain, case.group_sizes)))
