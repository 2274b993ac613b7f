"""Calls of the CUDA kernels by row, by map and by head: what their handlers take, in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checks.handlers import assert_served, handlers
from support.drivers.lowering import CustomCall, custom_calls

from cuda_backend import (
    choose_experts,
    dense_matmul,
    driver,
    ffi,
    grouped_matmul,
    image_attention,
    keep_likely,
    kernels,
    layer_norm,
    lora_rows,
    merge,
    place_heads,
    rms_norm,
    take_rows,
    transport,
    virtual_memory,
)
from cuda_backend.all_gather import (
    PATIENCE_NS,
    all_gather,
    all_to_all,
    all_to_all_owned,
    all_to_all_rows,
)
from lora_jax.config import MoeConfig
from lora_jax.ops import dispatch
from lora_jax.ops.place_heads import PlaceHeadsArgs

MOE = MoeConfig(num_experts=128, top_k=8, intermediate_size=8, layers=(0,), topk_norm=1.0)
DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32, "ui8": jnp.uint8}


def shape(written: str) -> jax.ShapeDtypeStruct:
    """Return an array's shape from words such as "8x128xbf16"."""
    *sizes, dtype = written.split("x")
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), DTYPES[dtype])


def only_call(function, *written: str | None) -> CustomCall:
    """Return the one call of a function of arrays; it is as its handler wants it."""
    arrays = [None if one is None else shape(one) for one in written]
    (call,) = custom_calls(function, *arrays)
    assert_served(call)
    return call


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays, and its call's operands, results, attributes and aliases."""

    function: object
    arrays: tuple[str | None, ...]
    target: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: dict
    aliases: dict = dataclasses.field(default_factory=dict)


def eps(function):
    return lambda *arrays: function(*arrays, 0.5)


ROW_BY_ROW = (
    *("9x40xf32", "9x72xbf16", "8x72xbf16", "8x40xbf16"),
    *("6x2x5xi32", "6x2xf32", "9xi32", "9xi32"),
)
CASES = {
    "rms norm of a sum": Case(
        eps(rms_norm.rms_norm),
        ("9x64xbf16", "9x64xbf16", "64xbf16"),
        "rms_norm",
        ("9x64xbf16", "9x64xbf16", "64xbf16"),
        ("9x64xbf16", "9x64xbf16"),
        {"eps": 0.5},
    ),
    "rms norm": Case(
        eps(rms_norm.rms_norm),
        ("9x64xbf16", None, "64xbf16"),
        "rms_norm",
        ("9x64xbf16", "0xbf16", "64xbf16"),
        ("0xbf16", "9x64xbf16"),
        {"eps": 0.5},
    ),
    "layer norm": Case(
        eps(layer_norm.layer_norm),
        ("9x64xbf16", "64xbf16", None),
        "layer_norm",
        ("9x64xbf16", "64xbf16", "0xbf16"),
        ("9x64xbf16",),
        {"eps": 0.5},
    ),
    "experts": Case(
        lambda logits: choose_experts.choose_experts(logits, MOE),
        ("5x128xf32",),
        "choose_experts",
        ("5x128xf32",),
        ("5x8xf32", "5x8xi32"),
        {"softmax_first": True, "normed": True, "scale": 1.0},
    ),
    "rows by index": Case(
        take_rows.take_rows,
        ("9x64xbf16", "20xi32", "i32"),
        "take_rows",
        ("9x64xbf16", "20xi32", "1xi32"),
        ("20x64xbf16",),
        {},
    ),
    "likely tokens": Case(
        keep_likely.keep_likely,
        ("5x1000xf32", "5xf32", "5xi32", "5xf32"),
        "keep_likely",
        ("5x1000xf32", "5xf32", "5xi32", "5xf32"),
        ("5xf32",),
        {},
    ),
    "dense map": Case(
        lambda x, w, rows: dense_matmul.dense_matmul(x, w, rows, None, None, gelu=True),
        ("9x64xbf16", "32x64xbf16", "i32"),
        "dense_matmul",
        ("9x64xbf16", "32x64xbf16", "1xi32", "0xbf16", "0xbf16"),
        ("9x32xbf16",),
        {"gelu": True},
    ),
    "attention of an image": Case(
        lambda qkv, cos, sin, count: image_attention.turned_attention(
            qkv, cos, sin, None, count, 0.5, leading=True
        ),
        ("200x3x16x72xbf16", "200x36xf32", "200x36xf32", "i32"),
        "turned_attention",
        ("200x3x16x72xbf16", "200x36xf32", "200x36xf32", "1xi32"),
        # 384 patches are whole tiles of 192 queries, 224 of 112 keys.
        ("200x16x72xbf16", "3x16x48x10x8x8xbf16"),
        {"scale": 0.5},
    ),
    "product in float32": Case(
        lambda x, w, sizes: grouped_matmul.grouped_matmul(x, w, sizes, None),
        ("9x64xf32", "4x32x64xf32", "4xi32"),
        "grouped_f32",
        ("9x64xf32", "4x32x64xf32", "4xi32", "0xf32"),
        ("9x32xf32",),
        {},
    ),
    "product of bfloat16 rows in float32": Case(
        grouped_matmul.grouped_matmul,
        ("9x64xbf16", "4x32x64xf32", "4xi32", "4x32xf32"),
        "grouped_f32",
        ("9x64xbf16", "4x32x64xf32", "4xi32", "4x32xf32"),
        ("9x32xf32",),
        {},
    ),
    "merge in place": Case(
        lambda *arrays: merge.merge(*arrays, 16),
        ("2x64x128xbf16", "9x128xbf16", "9x64xbf16", "2x3xi32", "2xf32"),
        "merge",
        ("2x64x128xbf16", "9x128xbf16", "9x64xbf16", "2x3xi32", "2xf32"),
        ("2x64x128xbf16",),
        {"max_rank": 16},
        {0: 0},
    ),
    "merge to another array": Case(
        lambda *arrays: merge.merge(*arrays, 16, in_place=False),
        ("2x64x128xbf16", "9x128xbf16", "9x64xbf16", "2x3xi32", "2xf32"),
        "merge",
        ("2x64x128xbf16", "9x128xbf16", "9x64xbf16", "2x3xi32", "2xf32"),
        ("2x64x128xbf16",),
        {"max_rank": 16},
    ),
    "places of two maps and their results": Case(
        lambda: merge.places((1024, 2048, 3072, 4096), ((64, 128), (32, 64)), 16),
        (),
        "merge_places",
        (),
        ("512xui8",),
        {"addresses": [1024, 2048, 3072, 4096], "shapes": [64, 128, 32, 64], "max_rank": 16},
    ),
    "merge of maps whose places are known": Case(
        lambda table, a, b, c, d, *rest: merge.write(
            table, ((2, 64, 128), (1, 32, 64)), 16, ((a, b), (c, d)), *rest
        ),
        (
            "768xui8",
            *("9x128xbf16", "9x64xbf16", "9x64xbf16", "9x32xbf16"),
            *("3x3xi32", "3xf32", "i32"),
        ),
        "merge_placed",
        (
            *("768xui8", "3x3xi32", "3xf32", "i32"),
            *("9x128xbf16", "9x64xbf16", "9x64xbf16", "9x32xbf16"),
        ),
        ("i32",),
        {"groups": [2, 64, 128, 1, 32, 64], "max_rank": 16},
        {3: 0},
    ),
    "adapters row by row": Case(
        lambda y, x, a, b, entries, scaling, slots, experts: lora_rows.lora_rows(
            [y], [(entries, scaling)], [3], x, a, b, slots, experts, 200
        ),
        ROW_BY_ROW,
        "lora_rows",
        ROW_BY_ROW,
        ("9x40xf32",),
        {"site": 3, "max_rank": 200},
        {0: 0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_what_its_handler_takes(on_hopper, name):
    case = CASES[name]
    call = only_call(case.function, *case.arrays)
    assert call.target == f"lora_jax_cuda_{case.target}"
    assert (call.operands, call.results) == (case.operands, case.results)
    assert (call.attributes, call.aliases) == (case.attributes, case.aliases)


def test_every_target_has_a_handler():
    assert set(ffi.TARGETS) == set(handlers()) - {ffi.library().state}


def test_the_backend_names_its_kernels():
    found = kernels()
    assert found["lora_gemm"].__module__ == "cuda_backend.lora_gemm"
    assert found["load_kernels"] is ffi.available
    assert all(callable(kernel) for kernel in found.values())


ROWS = ("9x4x64xbf16", "9x2x64xbf16", "9x2x64xbf16", "9x32xf32", "9x32xf32")
PAGES = ("5x16x2x64xbf16", "5x16x2x64xbf16", "9xi32")


def placed(q, k, v, cos, sin, k_pages, v_pages, slots, *scales, in_place=False):
    args = PlaceHeadsArgs(q, k, v, cos, sin, scales or None, k_pages, v_pages, slots, 0.5)
    return place_heads.place_heads(dataclasses.replace(args, in_place=in_place))


@pytest.mark.parametrize("name", ["plain", "normed"])
def test_heads_are_placed_in_the_pages_own_memory(on_hopper, name):
    scales = ("64xbf16", "64xbf16") if name == "normed" else ()
    call = only_call(placed, *ROWS, *PAGES, *scales)
    assert call.target == "lora_jax_cuda_place_heads"
    assert call.operands == (*ROWS, *(scales or ("0xbf16",) * 2), PAGES[2], *PAGES[:2])
    assert call.results == (ROWS[0], *PAGES[:2])
    assert call.aliases == {8: 1, 9: 2}
    assert call.attributes == {"eps": 0.5}


def test_heads_are_placed_in_pages_that_stay_the_callers(on_hopper):
    call = only_call(functools.partial(placed, in_place=True), *ROWS, *PAGES)
    assert call.target == "lora_jax_cuda_place_heads_in_place"
    assert (call.results, call.aliases) == ((ROWS[0],), {})


@pytest.mark.parametrize(
    ("op", "result", "parts"),
    [
        (all_gather, "8x128xbf16", 0),
        (all_to_all, "8x32xbf16", 1),
        (all_to_all_rows, "2x128xbf16", 2),
    ],
    ids=["gather", "swap", "swap of rows"],
)
def test_an_exchange_brings_the_columns_of_all_devices(on_hopper, op, result, parts):
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict.fromkeys(("in_specs", "out_specs"), jax.P(None, "tp"))
    body = lambda v: op(v, "tp", 7)  # noqa: E731
    call = only_call(jax.shard_map(body, mesh=mesh, **specs, check_vma=False), "8x128xbf16")
    assert call.target == "lora_jax_cuda_all_gather"
    assert (call.operands, call.results) == (("8x32xbf16",), (result,))
    assert call.attributes == {"group": 7, "patience": PATIENCE_NS, "parts": parts}


def test_owned_rows_come_with_their_places_and_owners(on_hopper):
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    body = lambda v, source, owner: all_to_all_owned(v, source, owner, "tp", 7)  # noqa: E731
    specs = {"in_specs": (jax.P("tp"), jax.P(), jax.P()), "out_specs": jax.P("tp")}
    mapped = jax.shard_map(body, mesh=mesh, **specs, check_vma=False)
    call = only_call(mapped, "32x64xbf16", "9xi32", "9xi32")
    assert call.target == "lora_jax_cuda_all_to_all_owned"
    assert (call.operands, call.results) == (("8x64xbf16", "9xi32", "9xi32"), ("9x16xbf16",))
    assert call.attributes == {"group": 7, "patience": PATIENCE_NS}


def test_an_exchange_is_of_a_group_and_of_whole_units(on_hopper):
    with pytest.raises(NotImplementedError, match="all_gather needs a GatherGroup, not group 0"):
        all_gather(jnp.zeros((2, 8)), "tp", 0)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict.fromkeys(("in_specs", "out_specs"), jax.P(None, "tp"))
    odd = jax.shard_map(lambda v: all_gather(v, "tp", 3), mesh=mesh, **specs, check_vma=False)
    with pytest.raises(NotImplementedError, match="units of 16 bytes, not 3 x bfloat16"):
        custom_calls(odd, shape("2x6xbf16"))


def test_the_backend_opens_a_gpu_or_says_why_not(monkeypatch):
    """Memory and transport are asked for by device; without a driver there is neither."""
    absent = functools.partial(driver.Driver, "libcuda-that-is-not-there.so.1")
    monkeypatch.setattr(driver, "Driver", lambda library: absent())
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        transport(1)
    with pytest.raises(NotImplementedError, match="no CUDA driver"):
        virtual_memory(1)


F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (lambda: merge.check_support(F32, 64, 64, 8), "bfloat16, not float32"),
        (lambda: merge.check_support(BF16, 64, 96, 8), "d_in in steps of 64, not 96"),
        (lambda: merge.check_support(BF16, 60, 64, 8), "d_out in steps of 8, not 60"),
        (lambda: merge.check_support(BF16, 64, 64, 129), "ranks to 128, not 129"),
        (lambda: dense_matmul.check_support(F32, 1, 8, 8), "bfloat16, not float32"),
        (lambda: dense_matmul.check_support(BF16, 1, 8, 12), "not 1 rows of 12 and 8"),
        (lambda: image_attention.check_support(F32, 16, 72), "bfloat16, not float32"),
        (lambda: image_attention.check_support(BF16, 16, 64), "heads of 72, not 64"),
        (lambda: image_attention.check_support(BF16, 101, 72), "up to 100 heads, not 101"),
        (lambda: grouped_matmul.check_support(BF16, 1, 8, 8), "float32, not bfloat16"),
        (lambda: grouped_matmul.check_support(F32, 0, 8, 8), "not 0 rows by 8"),
        (lambda: grouped_matmul.check_support(F32, 1, 8, 6), "d_in in steps of 4, not 6"),
        (
            lambda: lora_rows.check_support(shape("2x8xbf16"), np.zeros((2, 8), np.int32), 8),
            "no int32 to bfloat16",
        ),
        (
            lambda: lora_rows.check_support(shape("2x8xf32"), np.zeros((2, 8), "f4"), 9000),
            "2 rows of 8 to 8 by rank 9000",
        ),
    ],
)
def test_declines_what_no_kernel_serves(check, why):
    with pytest.raises(NotImplementedError, match=why):
        check()


def test_a_writer_tells_where_arrays_lie_and_declines_more_shapes(on_hopper, monkeypatch):
    told = []
    monkeypatch.setattr(merge, "places", lambda *given: (told.append(given), jnp.zeros(1))[1])
    maps = tuple(jnp.zeros((8 * (n + 1), 64), BF16) for n in range(9))
    results = tuple(jnp.copy(w) for w in maps)
    merge.merge_writer(maps[:2], results[:2], 16)
    pairs = [each.unsafe_buffer_pointer() for n in range(2) for each in (results[n], maps[n])]
    assert told == [(tuple(pairs), ((8, 64), (16, 64)), 16)]
    with pytest.raises(NotImplementedError, match="8 shapes of maps, not 9"):
        merge.merge_writer(maps, results, 16)


def test_declines_an_addend_of_another_dtype(on_hopper):
    arrays = jnp.zeros((2, 8), BF16), jnp.zeros((8, 8), BF16), jnp.int32(2), None
    with pytest.raises(NotImplementedError, match="addend of bfloat16, not float32"):
        dense_matmul.dense_matmul(*arrays, jnp.zeros((2, 8), F32), gelu=False)


@pytest.mark.parametrize(
    ("backend", "capability", "there", "why"),
    [
        ("cpu", "9.0", True, "cannot run on cpu"),
        ("gpu", "8.0", True, "built for capability 9.0, not 8.0"),
        ("gpu", "9.0", False, f"{dispatch.NOT_BUILT}$"),
        ("gpu", "9.0", True, None),
    ],
)
def test_kernels_are_declined_where_they_cannot_run(monkeypatch, backend, capability, there, why):
    device = type("Device", (), {"compute_capability": capability})()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(ffi, "available", lambda: there)
    if why is None:
        ffi.require()
        return
    with pytest.raises(NotImplementedError, match=why):
        ffi.require()
