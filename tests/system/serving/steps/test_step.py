"""Step inputs from the table of integers, against a plain walk over the sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.steps.device_state import init_row_state
from serving.steps.step import (
    StepSizes,
    _split,
    num_read_rows,
    rows_in_read,
    split_slots,
    unpack_batch,
    unpack_logit_rows,
    unpack_read_rows,
    with_drafts,
)

SIZES = StepSizes(max_seqs=5, max_len=20, page_size=4, num_pages=30, max_logit_rows=12, max_rank=8)


def make_case(seed):
    """Return table, block tables and history; some rows do not run, some score, some sample."""
    rng = np.random.default_rng(seed)
    table = np.zeros((5, 5), np.int32)
    for row in rng.permutation(5)[: rng.integers(1, 5)]:
        count = int(rng.integers(1, 6))
        start = int(rng.integers(0, 20 - count))
        targets = int(rng.integers(0, min(count, 2) + 1))
        samples = int(rng.integers(0, 2)) if targets < count else 0
        table[:, row] = start, count, rng.integers(-1, 3), targets, samples
    block_tables = rng.permutation(30)[:25].reshape(5, 5).astype(np.int32)
    return table, block_tables, rng.integers(0, 99, (5, 20)).astype(np.int32)


def walk(table, block_tables, history):
    """Yield per real token: token, position, row, slot, page slot; and per logit row likewise."""
    tokens, rows = [], []
    for row in range(5):
        start, count, slot, targets, samples = table[:, row].tolist()
        first = len(tokens)
        for position in range(start, start + count):
            page = block_tables[row, position // 4]
            tokens.append((history[row, position], position, row, slot, page * 4 + position % 4))
        for offset in range(targets):
            position = start + offset + 1
            rows.append((first + offset, row, slot, position, history[row, position]))
        if samples:
            rows.append((first + count - 1, row, slot, start + count, -1))
    return tokens, rows


@pytest.mark.parametrize("seed", range(20))
def test_tables_become_tokens_and_logit_rows(seed):
    table, block_tables, history = make_case(seed)
    tokens, rows = walk(table, block_tables, history)
    batch = jax.jit(unpack_batch, static_argnums=(3, 4))(table, block_tables, history, 32, SIZES)
    assert int(batch.num_tokens) == len(tokens)
    fields = (
        batch.tokens,
        batch.positions,
        batch.token_to_seq,
        batch.token_to_slot,
        batch.token_to_page_slot,
    )
    got = np.stack([np.asarray(field) for field in fields], 1)
    np.testing.assert_array_equal(got[: len(tokens)], np.array(tokens).reshape(-1, 5))
    padding = got[len(tokens) :]
    assert not padding[:, :3].any()
    assert (padding[:, 3] == -1).all()
    assert (padding[:, 4] >= 30 * 4).all()
    assert len(set(got[:, 4].tolist())) == 32  # distinct: the cache's writes rely on it
    chosen = jax.jit(unpack_logit_rows, static_argnums=3)(table, batch, history, 12)
    assert int(chosen.num_rows) == len(rows)
    fields = (
        chosen.row_to_token,
        chosen.row_to_seq,
        chosen.row_to_slot,
        chosen.positions,
        chosen.targets,
    )
    got = np.stack([np.asarray(field) for field in fields], 1)
    np.testing.assert_array_equal(got[: len(rows)], np.array(rows).reshape(-1, 5))
    assert (got[len(rows) :, 2] == -1).all()
    assert (got[len(rows) :, 4] == -1).all()


def test_drafts_are_the_last_input_tokens_and_each_yields_a_token():
    table = np.zeros((5 + 3, 5), np.int32)
    table[:, 1] = 7, 3, 2, 0, 3, 71, 72, 0  # two drafts behind the token at 7
    table[:, 3] = 4, 1, -1, 0, 1, 99, 99, 99  # none, whatever stands there
    table[:, 4] = 16, 4, 0, 0, 4, 81, 82, 83  # three, up to the last place
    state = init_row_state(5, 20)
    history = np.asarray(jax.jit(with_drafts)(state, table).history)
    want = np.zeros((5, 20), np.int32)
    want[1, 8:10], want[4, 17:20] = [71, 72], [81, 82, 83]
    np.testing.assert_array_equal(history, want)
    block_tables = np.arange(25, dtype=np.int32).reshape(5, 5)
    batch = jax.jit(unpack_batch, static_argnums=(3, 4))(table, block_tables, history, 16, SIZES)
    rows = jax.jit(unpack_logit_rows, static_argnums=3)(table, batch, history, 12)
    assert int(rows.num_rows) == 8
    np.testing.assert_array_equal(rows.row_to_token[:8], range(8))
    np.testing.assert_array_equal(rows.positions[:8], [8, 9, 10, 5, 17, 18, 19, 20])
    np.testing.assert_array_equal(rows.row_to_seq[:8], [1, 1, 1, 3, 4, 4, 4, 4])
    assert (np.asarray(rows.targets[:8]) == -1).all()


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_read_are_those_of_logits_and_of_heads(seed):
    table, block_tables, history = make_case(seed)
    by_head = np.random.default_rng(seed).random(5) < 0.5
    by_head &= table[1] > 0
    table[3:, by_head] = 0
    asked = table.copy()
    asked[4, by_head] = -1
    batch = unpack_batch(*map(jnp.asarray, (table, block_tables, history)), 32, SIZES)
    rows = unpack_logit_rows(jnp.asarray(table), batch, history, 12)
    read = unpack_read_rows(jnp.asarray(asked), batch, history, 17)
    num_rows = int(rows.num_rows)
    assert int(read.num_rows) == num_rows + by_head.sum()
    at = np.asarray(rows_in_read(jnp.asarray(asked), rows))[:num_rows]
    np.testing.assert_array_equal(read.row_to_token[at], rows.row_to_token[:num_rows])
    heads = np.cumsum(num_read_rows(jnp.asarray(asked)))[by_head] - 1
    last_tokens = np.cumsum(table[1])[by_head] - 1
    np.testing.assert_array_equal(np.asarray(read.row_to_token)[heads], last_tokens)
    assert len({*at.tolist(), *heads.tolist()}) == int(read.num_rows)


def test_steps_of_decode_tokens_read_every_row():
    sizes = dataclasses.replace(SIZES, reads_rows=True, head_width=3)
    assert [sizes.read_rows(bucket) for bucket in (8, 10, 16, 128)] == [0, 0, 16, 17]
    assert SIZES.read_rows(128) == 0


def test_slots_past_those_of_lora_are_esft_s():
    table, block_tables, history = make_case(3)
    table[2] = [-1, 0, 1, 2, 4]
    table[1] = [2, 1, 1, 3, 1]
    tables = jnp.zeros((2, 3, 4), jnp.int32)
    batch = unpack_batch(*map(jnp.asarray, (table, block_tables, history)), 16, SIZES)
    assert batch.token_to_esft_slot is None
    split = split_slots(batch, 2, tables)
    assert split.token_to_slot.tolist() == [-1, -1, 0, 1] + [-1] * 12
    assert split.token_to_esft_slot.tolist() == [-1] * 4 + [0, 0, 0, 2] + [-1] * 8
    assert split.reroute_tables is tables


def test_slots_of_pairs_name_both():
    """2 LoRA slots, 3 ESFT slots, then both: 5 + esft * 2 + lora."""
    slots = np.arange(-1, 11, dtype=np.int32)
    lora, esft = _split(jnp.asarray(slots), 2, 3)
    assert lora.tolist() == [-1, 0, 1, -1, -1, -1, 0, 1, 0, 1, 0, 1]
    assert esft.tolist() == [-1, -1, -1, 0, 1, 2, 0, 0, 1, 1, 2, 2]
    lora, esft = _split(jnp.asarray(slots[:4]), 0, 3)
    assert (lora.tolist(), esft.tolist()) == ([-1, -1, -1, -1], [-1, 0, 1, 2])


def test_an_empty_table_is_a_step_of_padding():
    table = jnp.zeros((5, 5), jnp.int32)
    _, block_tables, history = make_case(0)
    batch = unpack_batch(table, jnp.asarray(block_tables), jnp.asarray(history), 8, SIZES)
    assert int(batch.num_tokens) == 0
    assert (np.asarray(batch.token_to_slot) == -1).all()


def test_sizes():
    assert SIZES.max_pages == 5
    assert [SIZES.logit_rows(bucket) for bucket in (8, 32)] == [8, 12]
