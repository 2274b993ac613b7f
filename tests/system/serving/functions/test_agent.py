"""Functions over one backbone: an engine's answers, memory counted once, and deaths apart."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes.process_facts import ended, held
from support.processes.server_process import ROOT

from lora_jax.quantize import quantize
from serving import Engine, Sampling
from serving.functions import Agent, DeviceFull, FunctionDied, jail, tenants

MODEL = ROOT / "assets" / "tiny-moe"
SIZES = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8, "max_loras": 1}
SIZES |= {"structured_outputs": False, "max_esft_adapters": 0, "max_lora_rank": 16}
TENANTS = {key: value for key, value in SIZES.items() if key != "max_loras"}
SAMPLING = Sampling(temperature=0, max_tokens=12, logprobs=1)
PROMPTS = ["The court", "原告"]


def answers(outputs) -> list:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text) for o in outputs]


@pytest.fixture(scope="module")
def agent():
    with Agent(MODEL, ttft_slo_s=1.0, **SIZES) as made:  # and so with turns
        for name in ("law", "summary"):
            made.function(MODEL / "adapters" / name)
        yield made
    assert made.functions == {}


@pytest.fixture(scope="module")
def coupled():
    """Answers of one engine with both adapters: tokens and log-probability bits."""
    adapters = {name: MODEL / "adapters" / name for name in ("law", "summary")}
    with Engine(MODEL, adapters, **SIZES) as engine:
        return {name: answers(engine.generate(PROMPTS, name, SAMPLING)) for name in adapters}


def test_answers_are_those_of_one_engine_with_both_adapters(agent, coupled):
    for name, want in coupled.items():
        assert answers(agent.functions[name].generate(PROMPTS, SAMPLING)) == want
    assert coupled["law"] != coupled["summary"]


@pytest.mark.long
def test_functions_over_a_base_in_four_bits_have_the_answers_of_one_engine(tmp_path):
    """The jail of a function runs no compiler, and codes are in the order that kernels read."""
    quantize(MODEL, "int4", tmp_path)
    law = MODEL / "adapters" / "law"
    with Engine(tmp_path, {"law": law}, **SIZES) as engine:
        want = answers(engine.generate(PROMPTS, "law", SAMPLING))
    with Agent(tmp_path, **SIZES) as four_bits:
        assert answers(four_bits.function(law).generate(PROMPTS, SAMPLING)) == want


def test_answers_stay_those_while_functions_have_the_device_in_turns(agent, coupled):
    """Turns of one step each, so that every answer is made in many of them."""
    table = agent.turns.table
    before, granted = (table._turn_s, table._least_s, table._overdue_s), []
    table._turn_s = table._least_s = 0.0
    table._overdue_s = 60.0  # on a busy machine a process may not run for longer than the default
    grant = table.grant
    table.grant = lambda now: (name := grant(now)) and (granted.append(name) or name)
    with ThreadPoolExecutor() as pool:
        names = ["law", "summary"] * 3
        answer = lambda name: answers(agent.functions[name].generate(PROMPTS, SAMPLING))  # noqa: E731
        assert list(pool.map(answer, names)) == [coupled[name] for name in names]
    table.grant, (table._turn_s, table._least_s, table._overdue_s) = grant, before
    assert len(set(granted)) == 2
    assert table.num_taken == 0


def test_the_backbone_is_counted_once(agent):
    """Its processes' shares add up to its bytes within 1%, when all have read all of it."""
    functions = agent.functions.values()
    assert [function.changed() for function in functions] == [[], []]
    shares = [function.memory() for function in functions]
    assert all(share["Size"] == agent.backbone_bytes for share in shares)
    assert sum(share["Pss"] for share in shares) == pytest.approx(agent.backbone_bytes, rel=0.01)


def test_a_killed_function_comes_back_and_harms_no_other(agent, coupled):
    law, summary = agent.functions["law"], agent.functions["summary"]
    killed, other = law.pid, summary.pid
    os.kill(killed, signal.SIGSTOP)  # so that the call cannot be answered before
    streamed = law.stream("The court", SAMPLING)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(FunctionDied, match="'law' ended during the call"):
        list(streamed)
    assert answers(summary.generate(PROMPTS, SAMPLING)) == coupled["summary"]
    assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
    assert (summary.pid, law.pid != killed) == (other, True)
    assert law.changed() == []


@pytest.fixture(scope="module")
def apart():
    """Functions of isolation "server": one engine, and a process per adapter.

    One that does not answer for 2 s, as is usual, may only lack a core of a busy machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tenants.DEFAULTS, "wait_s", 10.0)
        with Agent(MODEL, isolation="server", max_tenants=2, verify_s=1e5, **TENANTS) as made:
            for name in ("law", "summary"):
                made.function(MODEL / "adapters" / name)
            yield made


def test_adapters_in_processes_of_their_own_give_the_answers_of_one_engine(apart, coupled):
    functions = apart.functions
    with ThreadPoolExecutor() as pool:  # rows of both in one batch
        names = ["law", "summary"] * 3
        answer = lambda name: answers(functions[name].generate(PROMPTS, SAMPLING))  # noqa: E731
        assert list(pool.map(answer, names)) == [coupled[name] for name in names]
    pids = {functions[name].pid for name in coupled} | {apart.engine.pid}
    assert len(pids) == 3
    with pytest.raises(DeviceFull, match="All 2 seats of this backbone"):
        apart.function(MODEL / "adapters" / "translation")


@pytest.mark.long
def test_an_adapters_matrices_are_in_its_process_alone(apart):
    """Its file's own bytes are mapped or read by nobody else: the engine's jail has no such file"""
    for pid in (apart.engine.pid, apart.functions["summary"].pid):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "adapters/law" not in maps
    engine = Path(f"/proc/{apart.engine.pid}/maps").read_text()
    law = Path(f"/proc/{apart.functions['law'].pid}/maps").read_text()
    assert "lora_jax_pages" in engine
    assert "lora_jax_pages" not in law  # and it has no backbone


@pytest.mark.long
def test_a_killed_adapter_ends_its_own_calls_and_comes_back(apart, coupled):
    law, summary = apart.functions["law"], apart.functions["summary"]
    killed, other, engine = law.pid, summary.pid, apart.engine.pid
    streamed = summary.stream("The court", SAMPLING)
    os.kill(killed, signal.SIGSTOP)
    hanging = law.stream("The court", SAMPLING)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(FunctionDied, match="'law' ended during the call"):
        list(hanging)
    assert "".join(streamed) == coupled["summary"][0][2]
    assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
    assert (summary.pid, apart.engine.pid, law.pid != killed) == (other, engine, True)
    assert law.offload()
    assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]


@pytest.mark.long
def test_an_adapters_process_that_hangs_is_ended_and_others_lose_no_bit(apart, coupled):
    """It is stopped, and answers nothing: others in its step wait for it once."""
    law, summary = apart.functions["law"], apart.functions["summary"]
    hung, engine = law.pid, apart.engine.pid
    os.kill(hung, signal.SIGSTOP)
    streamed = summary.stream("The court", SAMPLING)
    with pytest.raises(FunctionDied, match="'law' ended during the call"):
        law.generate(PROMPTS, SAMPLING)
    assert "".join(streamed) == coupled["summary"][0][2]
    assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
    assert (law.pid != hung, apart.engine.pid) == (True, engine)


@pytest.mark.long
def test_a_killed_guard_stops_no_function_and_its_backup_finds_equal_digests(apart, coupled):
    guard, law = apart._guard, apart.functions["law"]
    assert guard.wait_checked(1, 60)
    killed, pid, seen = guard.pid, law.pid, guard.checks + guard.starts
    streamed = law.stream("The court", SAMPLING)
    os.kill(killed, signal.SIGKILL)
    assert "".join(streamed) == coupled["law"][0][2]
    guard.look()
    assert guard.wait_checked(seen + 1, 60)  # it begins with the digests of all arrays
    assert (guard.pid != killed, law.pid) == (True, pid)
    assert (law.changed(), law.pid) == ([], pid)


@pytest.mark.long
def test_a_function_with_a_task_head_reads_programs_that_a_process_without_it_made(
    agent, monkeypatch
):
    """As in the jail of a GPU, where nothing compiles."""
    monkeypatch.setattr(jail, "stops_compiling", lambda device: True)
    with agent.function(next((MODEL / "heads").iterdir()), name="headed") as function:
        assert answers(function.generate(PROMPTS[0], SAMPLING))
    del vars(agent)["_functions"]["headed"]


@pytest.mark.long
def test_an_offloaded_function_answers_again(agent, coupled):
    law = agent.functions["law"]
    first = law.pid
    assert law.offload()
    assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
    assert law.pid != first


@pytest.mark.long
def test_a_killed_zygote_is_replaced(agent):
    os.kill(agent._zygote.pid, signal.SIGKILL)
    agent._zygote._process.wait()
    base = agent.function(name="alone")
    assert base.generate("The", SAMPLING)[0].adapter is None
    base.close()


@pytest.mark.long
def test_a_function_s_neighbours_cannot_trace_it_or_read_its_memory(agent):
    """Unless they are root, whom nothing here holds back."""
    pid = agent.functions["law"].pid
    code = f"import os; os.setgid(65534); os.setuid(65534); open('/proc/{pid}/mem', 'rb')"
    if os.getuid():
        code = f"open('/proc/{pid}/mem', 'rb')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "PermissionError" in done.stderr


def named_sockets(pid: int) -> set[str]:
    """Return the names of a process' sockets on which others could ask it for descriptors."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {words[7] for words in lines if len(words) > 7 and words[6] in inodes}
    return names - {"@port"}  # of tests: see free_port


@pytest.mark.skipif(os.getuid() != 0, reason="only root may look at a function's descriptors")
def test_nobody_can_ask_for_the_descriptors_of_the_backbone(agent):
    """They go over sockets without a name, so none can be opened a second time."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"\0lora-jax-test-{os.getpid()}")
        assert len(named_sockets(os.getpid())) == 1  # what this test would find
    pids = [agent.functions[name].pid for name in ("law", "summary")]
    assert [named_sockets(pid) for pid in (os.getpid(), *pids)] == [set()] * 3


def test_functions_are_bound_by_the_kernel(agent):
    """Where it can bind a process here; what that refuses is in test_jail.py."""
    code = "from serving.functions import jail; print(jail.enter([], []))"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    with open(f"/proc/{agent.functions['law'].pid}/status") as status:
        bound = dict(line.split(":\t", 1) for line in status)
    assert bound["NoNewPrivs"].strip() == "1"
    assert "seccomp" in probe.stdout or bound["Seccomp"].strip() == "2"


@contextlib.contextmanager
def under_load(coupled):
    """Yield an agent and its function "law" while "summary" answers without a wrong token."""
    with Agent(MODEL, ttft_slo_s=1.0, **SIZES) as agent:
        law, summary = (agent.function(MODEL / "adapters" / n) for n in ("law", "summary"))
        before, stop, answered = held(), threading.Event(), []

        def load() -> None:
            while not stop.is_set():
                answered.append(answers(summary.generate(PROMPTS, SAMPLING)))

        thread, other = threading.Thread(target=load), summary.pid
        thread.start()
        try:
            yield agent, law
        finally:
            stop.set()
            thread.join(60)
        assert summary.pid == other
        assert answered == [coupled["summary"]] * len(answered)
        assert answered
        assert held()[0] <= before[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_deaths_of_a_function_lose_no_token_of_others_and_leak_nothing(coupled):
    with under_load(coupled) as (_, law):
        for _ in range(20):
            killed = law.pid
            os.kill(killed, signal.SIGKILL)
            assert ended(killed)
            while True:
                try:
                    assert answers(law.generate(PROMPTS, SAMPLING)) == coupled["law"]
                    break
                except FunctionDied:  # the call came before the death was noticed
                    continue


def test_what_cannot_be_served_is_refused_and_the_rest_goes_on(agent):
    with pytest.raises(ValueError, match=r"'law' has the adapter .*: give another name"):
        agent.function(MODEL / "adapters" / "summary", name="law")
    with pytest.raises(ValueError, match=r"nowhere: there is no config\.json"):
        Agent("/nowhere")
    for fields, words in (
        ({"isolation": "full"}, "one of none, server, process"),
        ({"max_tenants": 4}, "a size of isolation server or none"),
        ({"isolation": "server", "ttft_slo_s": 1.0}, "batches them all"),
        ({"verify_s": 0.0}, "verify_s must be in"),
        ({"max_num_seq": 4}, "'max_num_seq' is no field of .*did you mean 'max_num_seqs'"),
    ):
        with pytest.raises(ValueError, match=words):
            Agent(MODEL, **fields)
    assert agent.functions["law"].generate("a", SAMPLING)


def test_the_agent_needs_no_jax():
    code = (
        "import sys; from serving.functions import Agent, connect; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
