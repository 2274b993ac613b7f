"""Training state on disk, by orbax: what was reached at a step, to go on from."""

import collections
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2


class Checkpoints:
    """A folder of numbered states; the newest `KEPT` stay. Close it when training ends."""

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def save(self, step: int, state: Any) -> None:
        """Write a pytree of arrays as the state after `step` steps."""
        self._manager.save(step, args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()

    def restore_newest(self, like: Any) -> tuple[int, Any]:
        """Return (step, state) of the newest checkpoint, or (0, like) when there is none.

        `like` gives the tree, shapes and dtypes; ValueError when the file has others.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, like
        self._check_shapes(step, like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return step, self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def _check_shapes(self, step: int, like: Any) -> None:
        """Raise ValueError for other arrays; orbax would leave its reads of them unfinished."""
        stored = collections.Counter(
            (tuple(array.shape), str(array.dtype))
            for array in jax.tree.leaves(self._manager.item_metadata(step))
        )
        wanted = collections.Counter((x.shape, str(x.dtype)) for x in jax.tree.leaves(like))
        if stored != wanted:
            only = "; ".join(
                f"{what}: {', '.join(f'{dtype} of shape {shape}' for shape, dtype in counted)}"
                for what, counted in (("only there", stored - wanted), ("missing", wanted - stored))
                if counted
            )
            raise ValueError(f"The checkpoint of step {step} is of another training: {only}.")

    def close(self) -> None:
        self._manager.close()
