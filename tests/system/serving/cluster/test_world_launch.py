"""One command begins a world of NVSHMEM, emulated between real processes, and restarts it whole."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest
from support.cases import lora_server_cases as cases
from support.doubles import nvshmem_double
from support.processes.server_process import ROOT, free_port
from support.processes.world_server import WorldServer

from serving import Engine, Sampling

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TOKENS = 6
MODELS = ["a0", None, "a1", "a2"]
PROMPTS = cases.prompts_of(len(MODELS))
ASKED = MODELS, PROMPTS, TOKENS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def coupled(files):
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(*files, **cases.ENGINE) as engine:
        return [o.outputs[0].text for o in engine.generate(PROMPTS, MODELS, greedy)]


def served(files, folder, stack, count, *flags):
    """Return a server whose processes find the emulated library."""
    nvshmem_double.plugin(folder / "plugin")
    paths = [folder / "plugin", ROOT / "tests", ROOT / "src", ROOT]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return WorldServer(files, folder / "log", stack, [*cases.engine_flags(), *flags], env, count)


def test_a_world_answers_as_one_engine(files, coupled, tmp_path):
    with contextlib.ExitStack() as stack:
        server = served(files, tmp_path, stack, 1)
        assert server.answers(*ASKED) == coupled
        assert len(server.roles()) == 2


@pytest.mark.long
def test_a_lost_member_restarts_all(files, coupled, tmp_path):
    with contextlib.ExitStack() as stack:
        server = served(files, tmp_path, stack, 2, "--lora-attention", "remote")
        assert server.answers(*ASKED) == coupled
        ends = [(0, signal.SIGKILL), (1, signal.SIGSTOP), (-1, signal.SIGKILL)]
        for role, number in ends:  # a rank, a hung one, an instance
            server.lose(server.roles()[role], number, ASKED, coupled)
        assert server.log.read_text().count("has left the NVSHMEM world") == len(ends)


@pytest.mark.long
def test_without_a_library_the_start_is_refused(files, tmp_path):
    model, _ = files
    command = [sys.executable, "-m", "serving.launch", model, "--port", str(free_port())]
    command += [*cases.engine_flags(), "--lora-server", "1", "--lora-server-transport", "nvshmem"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "joins NVIDIA GPUs, and this process computes on cpu" in said
    assert "Traceback" not in said
