"""20 times kill -9 of each role of isolated functions: no token of others lost, nothing leaked."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.processes.process_facts import ended, held
from support.processes.server_process import ROOT

from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all
from lora_jax.models.shared_weights import load_into_arena
from serving import Engine, Sampling
from serving.functions import Agent, FunctionDied
from serving.functions.process_memory import private_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = ROOT / "assets" / "tiny-moe"
TENANTS = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8}
TENANTS |= {"structured_outputs": False, "max_esft_adapters": 0, "max_lora_rank": 16}
SIZES = TENANTS | {"max_loras": 1}
SAMPLING = Sampling(temperature=0, max_tokens=12, logprobs=1)
PROMPTS = ["The court", "原告"]
DEATHS = 20


def answers(outputs) -> list:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text) for o in outputs]


@pytest.fixture(scope="module")
def coupled():
    """Answers of one engine with both adapters: tokens and log-probability bits."""
    adapters = {name: MODEL / "adapters" / name for name in ("law", "summary")}
    with Engine(MODEL, adapters, **TENANTS, max_loras=2) as engine:
        return {name: answers(engine.generate(PROMPTS, name, SAMPLING)) for name in adapters}


ROLES = {  # of an agent of isolation "server": who is killed, and whether "summary" may lose calls
    "zygote": (lambda agent: agent._zygote.pid, False),
    "guard": (lambda agent: agent._guard.pid, False),
    "tenant": (lambda agent: agent.functions["law"].pid, False),
    "engine": (lambda agent: agent.engine.pid, True),
}


@pytest.mark.parametrize("role", ROLES)
def test_twenty_deaths_of_each_role_lose_no_token_of_others_and_leak_nothing(role, coupled):
    """The engine is everybody's by isolation "server": its calls end, and none is answered wrong.

    Memory is that of the processes that live on; the others' goes with them.
    """
    pid_of, is_shared = ROLES[role]
    with Agent(MODEL, isolation="server", max_tenants=2, verify_s=1e5, **TENANTS) as agent:
        law, summary = (agent.function(MODEL / "adapters" / n) for n in ("law", "summary"))
        assert agent._guard.wait_checked(1, 60)
        stop, answered, lost = threading.Event(), [], []

        def load() -> None:
            while not stop.is_set():
                try:
                    answered.append(answers(summary.generate(PROMPTS, SAMPLING)))
                except FunctionDied as error:
                    lost.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        before = used = None
        for number in range(DEATHS):
            while (killed := pid_of(agent)) is None:
                time.sleep(0.01)
            os.kill(killed, signal.SIGKILL)
            assert ended(killed) or role == "zygote"
            assert until_answered(law) == coupled["law"]
            if role == "zygote":  # its next fork finds that it has gone
                law.offload()
                assert until_answered(law) == coupled["law"]
            if role == "guard":
                agent._guard.look()
                assert agent._guard.wait_checked(number + 2, 60)
            if number == DEATHS // 4:
                before, used = held(), private_bytes(f"/proc/{agent.engine.pid}/smaps_rollup")
        after, grown = held(), private_bytes(f"/proc/{agent.engine.pid}/smaps_rollup")
        stop.set()
        thread.join(60)
        assert answered == [coupled["summary"]] * len(answered)
        assert answered
        assert is_shared or not lost
        assert after[0] <= before[0] + 2  # a socket of what is under way
        assert is_shared or grown < used + (16 << 20)


def until_answered(function) -> list:
    """Return the answers of a function whose process may have gone just now."""
    while True:
        with contextlib.suppress(FunctionDied):
            return answers(function.generate(PROMPTS, SAMPLING))


def test_twenty_deaths_of_an_agent_leave_no_process_and_no_memory():
    """Functions, guard, engine and zygote end with it; the next agent starts as the first did."""
    code = f"""
import sys
from serving.functions import Agent
agent = Agent({str(MODEL)!r}, isolation="server", max_tenants=2, verify_s=1e5, **{TENANTS!r})
law = agent.function({str(MODEL / "adapters" / "law")!r})
agent._guard.wait_checked(1, 60)
print(agent._zygote.pid, agent._guard.pid, agent.engine.pid, law.pid, flush=True)
for piece in law.stream("The court"):
    pass
while True:
    law.generate("The court")
"""
    free = os.statvfs("/dev/shm").f_bfree
    for _ in range(DEATHS):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 4
        process.kill()
        process.wait()
        process.stdout.close()
        assert all(ended(pid) for pid in pids)
    assert abs(os.statvfs("/dev/shm").f_bfree - free) < 1 << 14


def test_a_flipped_byte_ends_the_functions_over_it_and_they_come_back_over_new_pages(coupled):
    """The test's own pages stand for the backbone's: no importer could write one."""
    memory = HostMemory()
    _, _, arena = load_into_arena(MODEL, memory, dtype=None)
    with Agent(MODEL, verify_s=1e5, **SIZES) as agent:
        assert agent._guard.wait_checked(1, 60)
        pages = agent._backbone
        close_all(pages._fds)
        pages._fds, pages._manifest = arena.export(), arena.manifest.fields()
        os.kill(agent._guard.pid, signal.SIGKILL)  # the backup maps the test's pages
        agent._guard.look()
        assert agent._guard.wait_checked(2, 60)
        law = agent.function(MODEL / "adapters" / "law")
        first = law.pid
        assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
        memory.write(arena._address + 7, np.array([200], np.uint8))
        agent._guard.look()
        assert ended(first)
        assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
        assert law.changed() == []
