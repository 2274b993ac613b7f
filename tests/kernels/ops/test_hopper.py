"""Requirements of Mosaic kernels; errors name what a machine lacks."""

import types

import jax
import jax.numpy as jnp
import pytest

from lora_jax.ops import hopper

BF16 = jnp.dtype(jnp.bfloat16)


def pretend(monkeypatch, backend: str, **device) -> None:
    """Let jax report one device of this kind."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**device)])


def test_a_hopper_gpu_is_asked_for_only_to_run(monkeypatch):
    pretend(monkeypatch, "gpu", compute_capability="9.0", core_count=114)
    hopper.require("op", BF16, None)
    assert hopper.num_sms(None) == 114
    pretend(monkeypatch, "gpu", compute_capability="8.0")
    with pytest.raises(NotImplementedError, match=r"op on Mosaic GPU .* 9.0, not 8.0"):
        hopper.require("op", BF16, None)
    hopper.require("op", BF16, False)
    pretend(monkeypatch, "tpu")
    with pytest.raises(NotImplementedError, match="cannot run on tpu"):
        hopper.require("op", BF16, None)
    with pytest.raises(NotImplementedError, match="op on Mosaic GPU cannot run on tpu"):
        hopper.require_device("op", None)
    hopper.require_device("op", False)


def test_other_dtypes_decline():
    with pytest.raises(NotImplementedError, match="op on Mosaic GPU takes bfloat16, not float32"):
        hopper.require("op", jnp.dtype(jnp.float32), False)


def test_where_there_is_no_gpu_an_h200_is_assumed(monkeypatch):
    pretend(monkeypatch, "cpu")
    assert hopper.num_sms(False) == 132


def test_copied_rows_end_where_the_array_does(monkeypatch):
    """136 columns in tiles of two times 64: the second has 8 on one side, none on the other."""
    monkeypatch.setattr(hopper.pl, "when", lambda told: lambda do: do() if told else None)
    widths = {}
    for tile in (0, 1):
        for side in (0, 1):
            place = widths.setdefault((tile, side), [])
            hopper.at_own_width(place.append, 136, 64, 2, jnp.int32(tile), jnp.int32(side))
    assert widths == {(0, 0): [64], (0, 1): [64], (1, 0): [8], (1, 1): []}
    hopper.at_own_width(place.append, 256, 64, 2, jnp.int32(1), jnp.int32(1))
    assert place == [64]
