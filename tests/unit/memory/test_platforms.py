"""Memory of a platform; a backend is imported only on demand."""

import subprocess
import sys

import pytest

from lora_jax.memory.host import HostMemory
from lora_jax.memory.platforms import for_platform


def test_a_cpu_gets_the_hosts_memory():
    assert isinstance(for_platform("cpu"), HostMemory)


def test_a_platform_without_memory_is_said():
    with pytest.raises(NotImplementedError, match="'tpu'"):
        for_platform("tpu")


def test_an_npu_without_its_library_is_said():
    with pytest.raises(NotImplementedError, match="AscendCL"):
        for_platform("npu")


def test_backends_are_imported_late():
    code = (
        "import sys; from lora_jax.memory.platforms import for_platform; for_platform('cpu'); "
        "print([m for m in sys.modules if m.endswith('_backend')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
