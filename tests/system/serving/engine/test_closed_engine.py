"""A closed engine leaves nothing in its process: no array on the device, no program, no map."""

import gc
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from support.cases.engine_cases import SHAPES, make_engine

from lora_jax.adapters.registry_errors import HostFull
from lora_jax.ops import dispatch
from lora_jax.ops.cpu import build
from serving import Sampling

ROOT = Path(__file__).parents[4]
ROUNDS = 30
# Maps of a process, and its threads and open files, after each engine that came and went.
LOOP = """
import os, sys
import jax
from serving import Engine, Sampling

model = "assets/tiny-moe"
small = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_loras": 2}
for number in range(int(sys.argv[1])):
    fields = small | {"structured_outputs": number % 10 == 0}
    engine = Engine(model, {"law": f"{model}/adapters/law"}, **fields)
    engine.generate(["a"], adapter="law", sampling=Sampling(max_tokens=2))
    engine.close()
    counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    print(len(open("/proc/self/maps").readlines()), *counts, len(jax.live_arrays()), flush=True)
"""


def executables() -> list[weakref.ref]:
    """Return the compiled programs that jax holds in this process."""
    return [weakref.ref(o) for o in gc.get_objects() if type(o).__name__ == "MeshExecutable"]


def alive(references: list[weakref.ref]) -> list[str]:
    held = [reference() for reference in references]
    return [one.xla_executable.hlo_modules()[0].name for one in held if one is not None]


def test_a_closed_engine_that_is_still_referenced_holds_no_weights_and_no_steps(tmp_path):
    before = {id(reference()) for reference in executables()}
    engine = make_engine(tmp_path, SHAPES["llama"])
    model = [weakref.ref(a) for a in engine._loop._parts.runner._step._leaves]
    made = [one for one in executables() if id(one()) not in before]
    assert "jit_step" in alive(made)
    assert all(one() is not None for one in model)
    engine.generate(["a"], sampling=Sampling(max_tokens=2))

    engine.close()

    assert [one for one in model if one() is not None] == []
    assert "jit_step" not in alive(made)
    # What a server's last scrape and a notebook may still ask.
    assert engine.stats().running == 0
    assert b"vllm:" in generate_latest(engine.metrics.registry)
    assert engine.adapters() is not None
    with pytest.raises(HostFull, match=r"^The engine has stopped"):  # in place of a wait
        engine.registry.line.check_open()
    engine.close()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kept", [True, False], ids=["steps from files", "jax's own cache"])
def test_engines_that_come_and_go_leave_a_process_as_it_was(kept, tmp_path, monkeypatch):
    kernels, folder = build.library().build(dispatch.cache_folder()), tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for file in kernels.parent.glob(f"{kernels.name}*"):  # and its digest
        shutil.copy(file, folder)
    monkeypatch.setenv("LORA_JAX_CACHE", str(folder))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    if kept:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    command = [sys.executable, "-c", LOOP, str(ROUNDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = [[int(n) for n in line.split()] for line in done.stdout.splitlines()]
    assert len(counts) == ROUNDS
    # The first ones leave what all share: small programs of jax's, its threads, the libraries.
    settled, last = counts[11], counts[-1]
    assert last[0] <= settled[0] + 40, counts
    assert last[1] <= settled[1] + 2, counts
    assert last[2] <= settled[2], counts
    assert last[3] == 0, counts
