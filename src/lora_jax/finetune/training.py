"""A training loop over packed rows that can be stopped and taken up again at any checkpoint."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from lora_jax.finetune.checkpoint import Checkpoints
from lora_jax.typing import Array, Float, Int

LossFunction = Callable[[Any, Any, Any], Float[Array, ""]]  # (trained, frozen, batch)


@runtime_checkable
class AbstractRows(Protocol):
    """Training data on the host, row by row; PackedText is one."""

    @property
    def num_rows(self) -> int: ...

    def take(self, indices: Int[np.ndarray, "chosen"]) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Training schedule: AdamW, linear warm-up, cosine to a tenth, clipped gradients."""

    steps: int
    batch_rows: int
    learning_rate: float
    warmup_steps: int = 20
    weight_decay: float = 0.0
    beta2: float = 0.99
    seed: int = 0
    checkpoint_every: int = 0  # 0: only at the end, and only if there is a folder

    def __post_init__(self):
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"{self.steps} steps leave none after {self.warmup_steps} of warm-up")
        if self.batch_rows < 1 or self.learning_rate <= 0:
            raise ValueError(f"{self.batch_rows} rows a batch, rate {self.learning_rate}: too few")

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW with this schedule of rates; weights of one axis do not decay."""
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, self.warmup_steps, self.steps, self.learning_rate / 10
        )
        adamw = optax.adamw(rate, b2=self.beta2, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def matrices(tree: Any) -> Any:
    """Return which leaves decay: those with two axes or more, no norms and no biases."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def mean_loss(
    logits: Float[Array, "rows length vocab"],
    targets: Int[Array, "rows length"],
    weights: Float[Array, "rows length"],
) -> Float[Array, ""]:
    """Return the mean cross entropy, in nats, over the targets of weight 1."""
    losses = token_losses(logits, targets)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def token_losses(
    logits: Float[Array, "rows length vocab"], targets: Int[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """Return -ln softmax(logits)[target] of every place."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def batch_rows(num_rows: int, step: int, schedule: Schedule) -> Int[np.ndarray, "batch"]:
    """Return the rows of a step: each epoch is its own order of all rows, given by the seed."""
    first = step * schedule.batch_rows
    wanted = range(first, first + schedule.batch_rows)
    orders = {
        epoch: np.random.default_rng((schedule.seed, epoch)).permutation(num_rows)
        for epoch in range(wanted[0] // num_rows, wanted[-1] // num_rows + 1)
    }
    return np.array([orders[i // num_rows][i % num_rows] for i in wanted])


def fit(
    trained: Any,
    frozen: Any,
    loss: LossFunction,
    rows: AbstractRows,
    schedule: Schedule,
    *,
    folder: pathlib.Path | None = None,
    stop_after: int | None = None,
    label: str = "train",
) -> Any:
    """Return `trained` after schedule.steps steps of `loss(trained, frozen, batch)`.

    With a folder, the newest checkpoint in it is taken up, states are written to
    folder/checkpoints and one line per step to folder/loss.jsonl. `stop_after` ends early, as
    an interruption would, with a checkpoint. Donates nothing the caller passed.
    """
    optimizer = schedule.optimizer()
    leaves, tree = jax.tree.flatten(trained)
    with optax_arithmetic():
        state = {"trained": leaves, "optimizer": optimizer.init(leaves)}
    if folder:
        claim(folder, schedule)
    checkpoints = Checkpoints(folder / "checkpoints") if folder else None
    first, state = checkpoints.restore_newest(state) if checkpoints else (0, state)
    last = min(schedule.steps, schedule.steps if stop_after is None else stop_after)
    step_once = make_step(loss, optimizer, tree)
    log = LossLog(folder / "loss.jsonl" if folder else None, first)
    for step in tqdm(range(first, last), desc=label, initial=first, total=schedule.steps):
        batch = rows.take(batch_rows(rows.num_rows, step, schedule))
        state, value = step_once(state, frozen, batch)
        log.write(step, value)
        due = schedule.checkpoint_every and (step + 1) % schedule.checkpoint_every == 0
        if checkpoints and (due or step + 1 == last):
            checkpoints.save(step + 1, state)
    if checkpoints:
        checkpoints.close()
    return jax.tree.unflatten(tree, state["trained"])


def claim(folder: pathlib.Path, schedule: Schedule) -> None:
    """Write the schedule into the folder; ValueError if a run with another one began there."""
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / "schedule.json", json.dumps(dataclasses.asdict(schedule))
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{folder.name} holds a run with another schedule: {file.read_text()}")
    file.write_text(text, encoding="utf-8")


def make_step(loss: LossFunction, optimizer: optax.GradientTransformation, tree: Any) -> Callable:
    """Return the jitted step (state, frozen, batch) -> (state, loss); state holds flat leaves."""

    def flat_loss(leaves: list[Array], frozen: Any, batch: Any) -> Float[Array, ""]:
        return loss(jax.tree.unflatten(tree, leaves), frozen, batch)

    @jax.jit
    def step_once(state: Any, frozen: Any, batch: Any) -> tuple[Any, Float[Array, ""]]:
        value, gradient = jax.value_and_grad(flat_loss)(state["trained"], frozen, batch)
        with optax_arithmetic():
            updates, moments = optimizer.update(gradient, state["optimizer"], state["trained"])
            trained = optax.apply_updates(state["trained"], updates)
        return {"trained": trained, "optimizer": moments}, value

    return step_once


@contextlib.contextmanager
def optax_arithmetic() -> Iterator[None]:
    """Allow what optax does inside: it mixes dtypes and ranks that our own code keeps apart."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class LossLog:
    """One JSON line per step: step, loss in nats per token, seconds since the start.

    Lines of steps that are about to be taken again are dropped.
    """

    def __init__(self, path: pathlib.Path | None, first_step: int):
        self._path = path
        self._start = time.monotonic()
        if path:
            old = path.read_text(encoding="utf-8").splitlines(keepends=True) if first_step else []
            path.write_text("".join(old[:first_step]), encoding="utf-8")

    def write(self, step: int, loss: Float[Array, ""]) -> None:
        if self._path:
            seconds = round(time.monotonic() - self._start, 3)
            row = {"step": step, "loss": round(float(loss), 5), "seconds": seconds}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
