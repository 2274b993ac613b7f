"""Training states come back as they were written, the newest first."""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.finetune.checkpoint import KEPT, Checkpoints


def state(value: float) -> dict:
    return {"trained": {"a": jnp.full((2, 3), value)}, "optimizer": (jnp.int32(7), jnp.zeros(4))}


def test_the_newest_state_is_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    for step in (1, 2, 5):
        checkpoints.save(step, state(float(step)))
    checkpoints.close()
    kept = [p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()]
    assert len(kept) == KEPT
    again = Checkpoints(tmp_path / "c")
    step, got = again.restore_newest(state(0.0))
    again.close()
    assert step == 5
    np.testing.assert_array_equal(got["trained"]["a"], np.full((2, 3), 5.0, np.float32))
    assert got["optimizer"][0].dtype == jnp.int32


def test_an_empty_folder_starts_at_zero(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    like = state(3.0)
    assert checkpoints.restore_newest(like) == (0, like)
    checkpoints.close()


def test_a_state_of_another_shape_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, state(1.0))
    other = state(1.0) | {"trained": {"a": jnp.zeros((3, 3))}}
    with pytest.raises(ValueError, match="shape"):
        checkpoints.restore_newest(other)
    checkpoints.close()
