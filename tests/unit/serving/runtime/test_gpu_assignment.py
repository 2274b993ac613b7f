"""A role takes one GPU and leaves the others in sight; without GPUs it runs as before."""

import os
import subprocess
import sys

import pytest

from serving.runtime.gpu_assignment import first_of


@pytest.mark.parametrize(
    ("visible", "number", "wanted"),
    [
        ("4,5,6", 0, "4,5,6"),
        ("4, 5,6", 2, "6,4,5"),
        ("GPU-a,GPU-b", 1, "GPU-b,GPU-a"),
        ("", 3, ""),
    ],
)
def test_its_own_comes_first(visible, number, wanted):
    assert first_of(visible, number) == wanted


def test_those_of_a_split_model_come_first():
    assert first_of("4,5,6,7", 2, 2) == "6,7,4,5"
    with pytest.raises(ValueError, match=r"needs GPUs 2 to 4, .* or start fewer"):
        first_of("4,5,6,7", 2, 3)


def test_without_a_list_all_are_in_sight():
    names = first_of(None, 3).split(",")
    assert names[:5] == ["3", "0", "1", "2", "4"]
    assert sorted(names, key=int) == [str(n) for n in range(16)]


@pytest.mark.parametrize(("visible", "number"), [("4,5", 2), ("4,5", -1), (None, 16)])
def test_a_gpu_that_is_not_there_is_said(visible, number):
    with pytest.raises(ValueError, match=f"needs GPU {number}, .* or start fewer"):
        first_of(visible, number)


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
