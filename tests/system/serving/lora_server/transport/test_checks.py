"""Errors of mismatched exchanges while they are traced."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.transport_cases import batch, terms_of

from serving.lora_server.transport.checks import check_outputs, check_push
from serving.lora_server.transport.shapes import DOWN, GATE_UP

SHAPES = terms_of().shapes


def test_what_fits_is_let_through():
    x, ys, rows = batch(terms_of(), np.random.default_rng(0), 8)
    check_push(SHAPES, GATE_UP, x, rows)
    check_outputs(SHAPES, GATE_UP, x, ys)
    check_outputs(SHAPES, GATE_UP, x, [y.astype(jnp.bfloat16) for y in ys])


def test_rows_that_do_not_fit_are_refused():
    x, _, rows = batch(terms_of(), np.random.default_rng(0), 8)
    many, _, many_rows = batch(terms_of(), np.random.default_rng(0), 25)
    wide = dataclasses.replace(rows, row_to_server=rows.row_to_server.astype(jnp.float32))
    for said, arguments in {
        "site 2 is not one of 2": (2, x, rows),
        "site -1 is not one of 2": (-1, x, rows),
        "down sends float32": (DOWN, x, rows),
        "got bfloat16": (GATE_UP, x.astype(jnp.bfloat16), rows),
        "25 rows and a landing slot 24": (GATE_UP, many, many_rows),
        "row_to_server must be int32": (GATE_UP, x, wide),
        r"row_to_server must be int32 \(8,\), got int32 \(25,\)": (GATE_UP, x, many_rows),
    }.items():
        with pytest.raises(ValueError, match=said):
            check_push(SHAPES, *arguments)


def test_outputs_that_do_not_fit_are_refused():
    x, (gate, up), _ = batch(terms_of(), np.random.default_rng(0), 8)
    for said, ys in {
        r"adds to \[\(8, 12\), \(8, 12\)\], got \[\(8, 12\)\]": [gate],
        r"got \[\(7, 12\), \(8, 12\)\]": [gate[:7], up],
        "all float32 or all bfloat16": [gate, up.astype(jnp.bfloat16)],
        "got .'int32'.": [gate.astype(jnp.int32), up.astype(jnp.int32)],
    }.items():
        with pytest.raises(ValueError, match=said):
            check_outputs(SHAPES, GATE_UP, x, ys)
