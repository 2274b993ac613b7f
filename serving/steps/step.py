"""One step of the engine as one function on the device: forward, sample, remember.

The host sends one small table of integers, a column per sequence row; everything else (tokens,
positions, page slots, logit rows) follows from it and from what is already on the device. The step
comes in two parts, forward and sample, which may be one program or two.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ForwardBatch, ImageRows, ReadRows
from lora_jax.kv_cache import PagedKVCache
from lora_jax.nn.remote import RemoteExperts
from lora_jax.nn.task_head import head_logits
from lora_jax.ops.merge import mixture_slots
from lora_jax.sharding import Split
from lora_jax.typing import Array, Float, Int
from serving.steps.device_state import RowState
from serving.steps.image_encoder import ENCODER_ROW, POSITIONS, ImageOperands
from serving.steps.sampling.sampler import LogitRows, Sampled
from serving.steps.sampling.token_masks import TokenMasks

# Rows of the step table; behind them one for each draft that a sequence may have.
START, NUM_TOKENS, SLOT, NUM_TARGETS, SAMPLES = range(5)
TABLE_ROWS = 5
BY_HEAD = -1  # in place of a count in SAMPLES: the adapter's task head answers, nothing is drawn

_FEW_TOKENS = 8  # the smallest bucket, which serves decode steps
# sampler.sample, or another of its kind.
Sample = Callable[[Float[Array, "rows vocab"], LogitRows, RowState, TokenMasks | None], Sampled]


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Constants of an engine's steps; `max_rank` bounds the rank of any adapter."""

    max_seqs: int
    max_len: int
    page_size: int
    num_pages: int
    max_logit_rows: int
    max_rank: int
    head_width: int = 0  # of task heads' logits; 0: no trace of heads is in the programs
    max_drafts: int = 0  # of a sequence in one step; 0: no trace of them is in the programs
    num_host_pages: int = 0  # KV pages that host memory has room for
    pooled: bool = False  # KV pages are a pool's, not the step's own
    reads_rows: bool = False  # the last layer of a step with prompts leaves out what nobody reads
    page_stride: int = 1  # of page numbers in block tables: see lora_jax.pooled

    @property
    def table_rows(self) -> int:
        """Rows of the step table."""
        return TABLE_ROWS + self.max_drafts

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_len // self.page_size)

    @property
    def num_masks(self) -> int:
        """Token masks of a step: one for each sequence, and as many as one may have drafts."""
        return self.max_seqs + self.max_drafts

    def read_rows(self, bucket: int) -> int:
        """Rows whose final state is read, of logits and task heads; 0: that of every token is.

        Steps of decode tokens alone read them all.
        """
        heads = self.max_seqs if self.head_width else 0
        has_prompts = bucket > max(_FEW_TOKENS, 2 * self.max_seqs)
        return min(bucket, self.max_logit_rows + heads) if self.reads_rows and has_prompts else 0

    def logit_rows(self, bucket: int) -> int:
        """Logit rows of the program for steps of up to `bucket` tokens."""
        return min(bucket, self.max_logit_rows)


def forward_step(
    model: Any,
    cache: PagedKVCache,
    history: Int[Array, "seqs max_len"],
    slots: AdapterSlots | None,
    table: Int[Array, "table_rows seqs"],
    block_tables: Int[Array, "seqs max_pages"],
    bucket: int,
    sizes: StepSizes,
    reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None = None,
    remote: RemoteExperts | None = None,
    lora: bool = True,
    images: ImageOperands | None = None,
    split: Split | None = None,
    merged_slot: Int[Array, ""] | None = None,
) -> tuple[PagedKVCache, Float[Array, "rows vocab"], LogitRows, Float[Array, "seqs width"] | None]:
    """Return the cache after the step, its logit rows with their logits, and those of task heads.

    Column s of the table says that sequence row s runs tokens start..start + num_tokens - 1 with
    an adapter slot (-1: base; ESFT slots count on from the LoRA slots, then pairs), scores the next
    num_targets tokens of its prompt after the first ones, and draws the tokens after the last
    `samples` ones, several where `history` has drafts (see with_drafts), or (BY_HEAD) has its
    adapter's task head answer from the last one's state. Rows of a step follow each other in the
    order of sequence rows. Without `lora` no row may have a LoRA adapter, and no trace of LoRA is
    in the program; without `images` no trace of them. With `split` this is one device's part of the
    step; all have the same logits. With `merged_slot` the model's weights have that slot's adapter
    in them, and rows of others may come.
    """
    by_head, asked = table[SAMPLES] == BY_HEAD, table
    if sizes.head_width:  # a head's row has no logits of the vocabulary
        table = table.at[SAMPLES].set(jnp.where(by_head, 0, table[SAMPLES]))
    batch = unpack_batch(table, block_tables, history, bucket, sizes)
    if images is not None:
        batch = dataclasses.replace(batch, images=unpack_images(batch, images))
    rows = unpack_logit_rows(table, batch, history, sizes.logit_rows(bucket))
    if reroute_tables is not None:
        num_lora = 0 if slots is None else slots.num_slots
        batch = split_slots(batch, num_lora, reroute_tables)
        lora_rows, _ = _split(rows.row_to_slot, num_lora, reroute_tables.shape[1])
        rows = dataclasses.replace(rows, row_to_slot=lora_rows)
    slots = slots if lora else None
    if merged_slot is not None and lora:
        batch = mixture(batch, merged_slot)
    # Rows of an exchange with a LoRA Server are those of the step in every layer.
    num_read = sizes.read_rows(bucket) if remote is None else 0
    read = unpack_read_rows(asked, batch, history, num_read) if num_read else None
    hidden, cache = model(batch, cache, slots, sizes.max_rank, remote, split, read)
    states = rows.row_to_token if read is None else rows_in_read(asked, rows)
    logit_inputs = hidden[states], rows.num_rows, rows.row_to_slot
    logits = model.logits(*logit_inputs, slots, sizes.max_rank, split, remote)
    if not sizes.head_width:
        return cache, logits, rows, None
    if slots is None:  # then no row has an adapter
        return cache, logits, rows, jnp.zeros((sizes.max_seqs, sizes.head_width), jnp.float32)
    counts = table[NUM_TOKENS] if read is None else num_read_rows(asked)
    last = jnp.maximum(jnp.cumsum(counts) - 1, 0)
    heads = jnp.where(by_head, table[SLOT], -1)
    answers = head_logits(hidden[last], heads, slots, model.module_names, sizes.head_width)
    return cache, logits, rows, answers


def sample_step(
    logits: Float[Array, "rows vocab"],
    rows: LogitRows,
    state: RowState,
    sample: Sample,
    masks: TokenMasks | None = None,
    heads: Float[Array, "seqs width"] | None = None,
) -> tuple[RowState, Sampled]:
    """Return the state with every sampled token at its place, and what `sample` gave.

    `heads` are the logits of task heads, which go through as they are.
    """
    sampled = dataclasses.replace(sample(logits, rows, state, masks), heads=heads)
    return _remember(state, rows, sampled.token_ids), sampled


def with_drafts(state: RowState, table: Int[Array, "table_rows seqs"]) -> RowState:
    """Return the state with the drafts of each sequence in its history."""
    return dataclasses.replace(state, history=history_with_drafts(state.history, table))


def history_with_drafts(
    history: Int[Array, "seqs max_len"], table: Int[Array, "table_rows seqs"]
) -> Int[Array, "seqs max_len"]:
    """Return the history with the drafts of each sequence in it, as the last input tokens.

    A sequence that draws several tokens has a draft for each but the first.
    """
    drafts = table[TABLE_ROWS:]
    max_drafts, seqs = drafts.shape
    count = jnp.maximum(table[SAMPLES] - 1, 0)
    position, seq = jnp.indices((max_drafts, seqs), dtype=jnp.int32)
    positions = (table[START] + table[NUM_TOKENS] - count)[None] + position
    # Others go to distinct rows past the end and are dropped.
    row = jnp.where(position < count[None], seq, seqs + position * seqs + seq)
    return history.at[row, positions].set(drafts, mode="drop", unique_indices=True)


def unpack_batch(
    table: Int[Array, "table_rows seqs"],
    block_tables: Int[Array, "seqs max_pages"],
    history: Int[Array, "seqs max_len"],
    bucket: int,
    sizes: StepSizes,
) -> ForwardBatch:
    """Return the tokens of the step, `bucket` of them with padding, taken from `history`."""
    seq, offset, live = _spread(table[NUM_TOKENS], bucket)
    positions = jnp.where(live, table[START, seq] + offset, 0)
    page = block_tables[seq, positions // sizes.page_size]
    # Dropped writes go to distinct places past the end.
    past = sizes.num_pages * sizes.page_stride * sizes.page_size
    padding = past + jnp.arange(bucket, dtype=jnp.int32)
    page_slot = page * sizes.page_size + positions % sizes.page_size
    return ForwardBatch(
        tokens=jnp.where(live, history[seq, positions], 0),
        positions=positions,
        token_to_seq=seq,
        token_to_slot=jnp.where(live, table[SLOT, seq], -1),
        token_to_page_slot=jnp.where(live, page_slot, padding),
        block_tables=block_tables,
        num_tokens=jnp.sum(table[NUM_TOKENS]),
    )


def unpack_images(batch: ForwardBatch, images: ImageOperands) -> ImageRows:
    """Return which token takes which encoder row, and the rope's positions of every token."""
    places = images.places[batch.token_to_seq, :, batch.positions]
    real = jnp.arange(places.shape[0], dtype=jnp.int32) < batch.num_tokens
    rows = jnp.where(real, places[:, ENCODER_ROW], -1)
    return ImageRows(images.rows, rows, places[:, POSITIONS].T)


def mixture(batch: ForwardBatch, merged_slot: Int[Array, ""]) -> ForwardBatch:
    """Return the batch for weights that have the adapter of `merged_slot` in them.

    Its rows need nothing more; from all others, rows of the base too, it is taken out.
    """
    own_slot, surplus = mixture_slots(batch.token_to_slot, merged_slot, merged_slot)
    real = jnp.arange(own_slot.shape[0], dtype=jnp.int32) < batch.num_tokens
    surplus = jnp.where(real, surplus, -1)
    return dataclasses.replace(batch, token_to_slot=own_slot, token_to_surplus_slot=surplus)


def split_slots(
    batch: ForwardBatch,
    num_lora: int,
    reroute_tables: Int[Array, "moe_layers esft_slots experts"],
) -> ForwardBatch:
    """Return the batch with slots from `num_lora` on as ESFT slots 0, 1, ...

    After the ESFT slots come those of a LoRA and an ESFT adapter together.
    """
    num_esft = reroute_tables.shape[1]
    lora, esft = _split(batch.token_to_slot, num_lora, num_esft)
    return dataclasses.replace(
        batch, token_to_slot=lora, token_to_esft_slot=esft, reroute_tables=reroute_tables
    )


def _split(
    slots: Int[Array, "rows"], num_lora: int, num_esft: int
) -> tuple[Int[Array, "rows"], Int[Array, "rows"]]:
    """Return LoRA and ESFT slots, -1 for none; num_lora + num_esft + e * num_lora + l is both."""
    both = slots - (num_lora + num_esft)
    lora = jnp.where(slots < num_lora, slots, -1)
    esft = jnp.where(slots >= num_lora, slots - num_lora, -1)
    if not num_lora:
        return lora, esft
    lora = jnp.where(both >= 0, both % num_lora, lora)
    return lora, jnp.where(both >= 0, both // num_lora, esft)


def unpack_logit_rows(
    table: Int[Array, "table_rows seqs"],
    batch: ForwardBatch,
    history: Int[Array, "seqs max_len"],
    num_rows: int,
) -> LogitRows:
    """Return the step's logit rows: of each sequence its targets in order, then its samples."""
    counts = table[NUM_TARGETS] + table[SAMPLES]
    seq, offset, live = _spread(counts, num_rows)
    is_target = live & (offset < table[NUM_TARGETS, seq])
    first = (jnp.cumsum(table[NUM_TOKENS]) - table[NUM_TOKENS])[seq]
    last = first + table[NUM_TOKENS, seq] - 1
    if table.shape[0] > TABLE_ROWS:  # there may be several samples
        last = last - (table[SAMPLES, seq] - 1 - (offset - table[NUM_TARGETS, seq]))
    row_to_token = jnp.where(live, jnp.where(is_target, first + offset, last), 0)
    positions = batch.positions[row_to_token] + 1
    target = history[seq, jnp.minimum(positions, history.shape[1] - 1)]
    return LogitRows(
        num_rows=jnp.sum(counts),
        row_to_token=row_to_token,
        row_to_seq=seq,
        row_to_slot=jnp.where(live, table[SLOT, seq], -1),
        positions=positions,
        targets=jnp.where(is_target, target, -1),
    )


def unpack_read_rows(
    table: Int[Array, "table_rows seqs"],
    batch: ForwardBatch,
    history: Int[Array, "seqs max_len"],
    num_rows: int,
) -> ReadRows:
    """Return the tokens whose states are read: those of logit rows, and each task head's last."""
    one = table.at[SAMPLES].set(jnp.abs(table[SAMPLES]))
    rows = unpack_logit_rows(one, batch, history, num_rows)
    return ReadRows(rows.row_to_token, rows.num_rows)


def num_read_rows(table: Int[Array, "table_rows seqs"]) -> Int[Array, "seqs"]:
    """Return how many rows of each sequence are read, one for a task head."""
    return table[NUM_TARGETS] + jnp.abs(table[SAMPLES])


def rows_in_read(table: Int[Array, "table_rows seqs"], rows: LogitRows) -> Int[Array, "rows"]:
    """Return the read row of each logit row: before it stand the heads of earlier sequences."""
    by_head = (table[SAMPLES] == BY_HEAD).astype(jnp.int32)
    heads_before = (jnp.cumsum(by_head) - by_head)[rows.row_to_seq]
    return jnp.arange(heads_before.shape[0], dtype=jnp.int32) + heads_before


def _spread(
    counts: Int[Array, "seqs"], size: int
) -> tuple[Int[Array, "size"], Int[Array, "size"], jax.Array]:
    """Return for each of `size` places its sequence, its place within it, and whether it is real.

    Places 0..counts[0]-1 belong to sequence 0, and so on; places past the sum have sequence 0.
    """
    ends = jnp.cumsum(counts)
    indices = jnp.arange(size, dtype=jnp.int32)
    live = indices < ends[-1]
    seq = jnp.searchsorted(ends, indices, side="right", method="compare_all").astype(jnp.int32)
    seq = jnp.where(live, seq, 0)
    return seq, indices - (ends - counts)[seq], live


def _remember(state: RowState, rows: LogitRows, token_ids: Int[Array, "rows"]) -> RowState:
    """Return the state with every sampled token at its position of the history."""
    indices = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    sampled = (indices < rows.num_rows) & (rows.targets < 0)
    # Others go to distinct rows past the end and are dropped, as is a token past max_len.
    seq = jnp.where(sampled, rows.row_to_seq, state.history.shape[0] + indices)
    history = state.history.at[seq, rows.positions].set(
        jnp.maximum(token_ids, 0), mode="drop", unique_indices=True
    )
    return dataclasses.replace(state, history=history)
