"""A role takes one GPU; without GPUs it runs as before."""

import os
import subprocess
import sys

import pytest

from serving.role_gpu import use_gpu


def test_one_gpu_is_taken_and_a_cpu_is_left_alone():
    code = (
        "from serving.role_gpu import use_gpu; use_gpu(3); import jax; "
        "from jax._src import xla_bridge; print(xla_bridge.CUDA_VISIBLE_DEVICES.value); "
        "print(jax.numpy.arange(4).sum())"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["3", "6"]), done.stderr[-2000:]


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        use_gpu(-1)
