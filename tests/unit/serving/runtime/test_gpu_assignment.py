"""A role takes one GPU and leaves the others in sight; without GPUs it runs as before."""

import os
import subprocess
import sys


def test_jax_sees_only_the_first_and_a_cpu_is_left_alone():
    code = (
        "from serving.runtime.gpu_assignment import use_gpu; use_gpu(1); import jax, os; "
        "from jax._src import xla_bridge; print(xla_bridge.CUDA_VISIBLE_DEVICES.value); "
        "print(os.environ['CUDA_VISIBLE_DEVICES'], jax.numpy.arange(4).sum())"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "5,7"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "7,5", "6"]), done.stderr[-2000:]
