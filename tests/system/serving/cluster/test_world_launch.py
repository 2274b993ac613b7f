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
from support.waiting import wait_until

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


def served(files, folder, stack, count, *flags, **options):
    """Return a server whose processes find the emulated library."""
    if not (folder / "plugin").exists():
        nvshmem_double.plugin(folder / "plugin")
    paths = [folder / "plugin", ROOT / "tests", ROOT / "src", ROOT]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    env["TMPDIR"] = str(folder)
    given = [*cases.engine_flags(), *flags], env, count
    return WorldServer(files, folder / "log", stack, *given, **options)


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


def joining(plugin):
    """Return the processes of the rank and the instance, which wait for their world to begin."""
    files = [plugin / nvshmem_double.JOINING.format(n) for n in (0, 1)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 240)
    return [int(file.read_text()) for file in files]


@pytest.mark.long
def test_members_that_join_do_not_outlive_a_killed_supervisor(files, tmp_path):
    plugin = tmp_path / "plugin"
    nvshmem_double.plugin(plugin)
    (plugin / nvshmem_double.HOLD).touch()
    with contextlib.ExitStack() as stack:
        server = served(files, tmp_path, stack, 1, waits=False)
        server.status = -signal.SIGKILL
        roles = joining(plugin)
        server.process.kill()
        server.process.wait(60)
        try:
            wait_until(lambda: not any(map(is_alive, roles)), 30)
        finally:
            for role in filter(is_alive, roles):
                os.kill(role, signal.SIGKILL)
        assert not [*tmp_path.glob("lora-server-*"), *tmp_path.glob("lora-jax-*")]


def is_alive(pid):
    """Return whether a process runs; one that has ended may wait for its parent."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.long
@pytest.mark.parametrize("member", [0, 1], ids=["rank", "instance"])
def test_a_member_that_hangs_while_it_joins_is_replaced(files, coupled, tmp_path, member):
    """Its supervisor waits for its answer meanwhile, and asks for no other health."""
    plugin = tmp_path / "plugin"
    with contextlib.ExitStack() as stack:
        server = served(files, tmp_path, stack, 1, "--lora-attention", "remote")
        for number in (0, 1):
            (plugin / nvshmem_double.JOINING.format(number)).unlink()
        (plugin / nvshmem_double.HOLD).touch()
        os.kill(server.roles()[0], signal.SIGKILL)
        begun = joining(plugin)
        os.kill(begun[member], signal.SIGSTOP)
        (plugin / nvshmem_double.HOLD).unlink()
        server.recovers(set(begun), ASKED, coupled)
        log = server.log.read_text()
        assert log.count("hangs while it starts; it is killed.") == 1
        assert log.count("has left the NVSHMEM world") == 2


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
