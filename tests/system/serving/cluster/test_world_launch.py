"""One command begins a world of NVSHMEM, emulated between real processes, and restarts it whole."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cases import lora_server_cases as cases
from support.doubles import nvshmem_double
from support.processes.server_process import ROOT, free_port, post, wait_healthy

from serving import Engine, Sampling

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
MODELS = ["a0", None, "a1", "a2"]
PROMPTS = cases.prompts_of(len(MODELS))
ROLES = 4  # two ranks and two instances


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def coupled(files):
    with Engine(*files, **cases.ENGINE) as engine:
        return [o.outputs[0].text for o in engine.generate(PROMPTS, MODELS, GREEDY)]


def environment(folder):
    """The variables of a process that finds the emulated library."""
    nvshmem_double.plugin(folder / "plugin")
    paths = [folder / "plugin", ROOT / "tests", ROOT / "src", ROOT]
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}


class Served:
    """The server of one command."""

    def __init__(self, files, folder, stack):
        model, adapters = files
        self.log, port = folder / "log", free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "serving.launch", model, "--port", str(port)]
        command += [*cases.engine_flags(), "--instances", "2", "--lora-server", "2"]
        command += ["--lora-server-transport", "nvshmem", "--lora-server-wait-s", "30"]
        command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(folder), stdout=out, stderr=out
            )
        stack.callback(self.end)
        wait_healthy(self.url, self.process, self.log)

    def end(self):
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log.read_text()[-3000:]

    def answers(self):
        def ask(name, prompt):
            body = {"model": name or "model", "prompt": prompt, "temperature": 0}
            body |= {"max_tokens": GREEDY.max_tokens, "ignore_eos": True}
            return post(f"{self.url}/v1/completions", body)["choices"][0]["text"]

        return [ask(*one) for one in zip(MODELS, PROMPTS, strict=True)]

    def roles(self):
        """Return the processes of the roles by their order of start, whatever thread did it."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = sorted(int(child) for file in threads for child in file.read_text().split())
        return [pid for pid in children if "spawn_main" in command_of(pid)]

    def lose(self, pid, number):
        """Signal a role; return when all roles are other processes and answer as before."""
        before, want = set(self.roles()), self.answers()
        os.kill(pid, number)
        end = time.monotonic() + 240
        while before & set(self.roles()) or len(self.roles()) < ROLES or not self.answer(want):
            assert time.monotonic() < end, self.log.read_text()[-5000:]
            time.sleep(0.2)

    def answer(self, want):
        """Return whether there are answers; others than `want` are an error."""
        try:
            got = self.answers()
        except OSError:
            return False
        except AssertionError as error:
            if str(error).startswith("503"):
                return False
            raise
        assert got == want
        return True


def command_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read()
    return ""


def test_a_world_answers_as_one_engine_and_restarts_as_a_whole(files, coupled, tmp_path):
    with contextlib.ExitStack() as stack:
        server = Served(files, tmp_path, stack)
        assert server.answers() == coupled
        roles = server.roles()
        assert len(roles) == ROLES
        server.lose(roles[-1], signal.SIGKILL)  # an instance
        assert "Instance 1 has left the NVSHMEM world" in server.log.read_text()


@pytest.mark.long
def test_a_lost_rank_and_a_hung_one_restart_all(files, coupled, tmp_path):
    with contextlib.ExitStack() as stack:
        server = Served(files, tmp_path, stack)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            server.lose(server.roles()[0], number)
            assert server.answers() == coupled


def test_without_a_library_the_start_is_refused(files, tmp_path):
    model, _ = files
    command = [sys.executable, "-m", "serving.launch", model, "--port", str(free_port())]
    command += [*cases.engine_flags(), "--lora-server", "1", "--lora-server-transport", "nvshmem"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "joins NVIDIA GPUs, and this process computes on cpu" in said
    assert "Traceback" not in said
