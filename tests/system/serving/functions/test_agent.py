"""Functions over one backbone: an engine's answers, memory counted once, and deaths apart."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.process_facts import ended, held
from support.processes.server_process import ROOT

from lora_jax.memory.wire import send_header
from serving import Engine, Sampling
from serving.functions import Agent, FunctionDied, jail
from serving.functions import agent as agent_module
from serving.functions.agent import _keep
from serving.functions.processes import Ends
from serving.functions.room import Room
from serving.functions.running import Running

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


def test_answers_stay_those_while_functions_have_the_device_in_turns(agent, coupled):
    """Turns of one step each, so that every answer is made in many of them."""
    table = agent._turns._table
    before, granted = (table._turn_s, table._least_s), []
    table._turn_s = table._least_s = 0.0
    grant = table.grant
    table.grant = lambda now: (name := grant(now)) and (granted.append(name) or name)
    with ThreadPoolExecutor() as pool:
        names = ["law", "summary"] * 3
        answer = lambda name: answers(agent.functions[name].generate(PROMPTS, SAMPLING))  # noqa: E731
        assert list(pool.map(answer, names)) == [coupled[name] for name in names]
    table.grant, (table._turn_s, table._least_s) = grant, before
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
    """Functions of isolation "server": one engine, and a process per adapter."""
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
    with pytest.raises(ValueError, match="All 2 seats of this backbone"):
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


def bare(**parts) -> Agent:
    """Return an agent of these parts alone."""
    agent = Agent.__new__(Agent)
    empty = {"_functions": {}, "_folders": {}, "_naming": threading.Lock(), "_ends": Ends()}
    vars(agent).update(empty | {"_tenants": None} | parts)
    return agent


def test_a_start_holds_up_no_other_and_one_that_fails_leaves_no_name():
    reached, go = threading.Event(), threading.Event()

    def start(name, folder):
        if name == "bad":
            raise ValueError("rank 99 is above the limit")
        if name == "slow":
            reached.set()
            assert go.wait(60)
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return Running(ours, 1, {})

    agent, ends = bare(_start=start), []
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(agent.function, name="slow")
        assert reached.wait(60)
        same = pool.submit(agent.function, name="slow")
        assert agent.function(name="slow", lazy=True).state == "starting"
        assert agent.function(name="quick").state == "running"
        with pytest.raises(ValueError, match="rank 99"):
            agent.function(name="bad")
        go.set()
        assert same.result(60) is slow.result(60)
    assert {*agent.functions} == {"slow", "quick"}
    for one in (*agent.functions.values(), *ends):
        one.close()


def test_a_backbone_is_loaded_anew_when_the_old_pages_are_free():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["cat"], stdin=theirs)  # until its connection ends
    ended_before = []
    renew = lambda: ended_before.append(process.poll() is not None)  # noqa: E731
    agent = bare(_published=SimpleNamespace(condemn=lambda why: [ours], renew=renew))
    with ours:
        agent._ends.note(ours, process.pid)
        agent._fail_over(["embedding"])
    assert ended_before == [True]


def test_with_a_changed_backbone_the_shared_engine_and_every_function_end(monkeypatch):
    closed = []
    engine = SimpleNamespace(close=lambda: closed.append("engine"))
    running = SimpleNamespace(close=lambda: closed.append("law"))
    functions = {"law": SimpleNamespace(running=running), "off": SimpleNamespace(running=None)}
    published = SimpleNamespace(condemn=lambda why: [], renew=lambda: closed.append("renewed"))
    parts = {"_published": published, "_functions": functions}
    agent = bare(**parts)
    agent._tenants = SimpleNamespace(engine=engine)
    agent._fail_over(["embedding"])
    assert closed == ["engine", "law", "renewed"]


def test_a_base_that_does_not_load_ends_the_zygote(tmp_path, monkeypatch):
    """Whatever was made until then goes with it."""
    ended = []
    zygote = SimpleNamespace(kill=lambda: ended.append("kill"), close=lambda: ended.append("close"))
    monkeypatch.setattr(agent_module, "Zygote", lambda: zygote)

    def refuse(model, dtype):
        raise ValueError("its weights are no safetensors")

    monkeypatch.setattr(agent_module, "Published", refuse)
    with pytest.raises(ValueError, match=r"Cannot share .*: there is no config.json"):
        Agent(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no safetensors"):
        Agent(tmp_path)
    assert ended == ["kill", "close"]
    assert not [one for one in agent_module._agents if one.model == str(tmp_path)]


def test_functions_of_one_model_and_sizes_share_a_backbone(tmp_path, monkeypatch):
    made = []

    class Fake:
        def __init__(self, model, **fields):
            made.append(fields)

        def function(self, adapter, *, name):
            return made[-1], adapter, name

    monkeypatch.setattr(agent_module, "Agent", Fake)
    monkeypatch.setattr(agent_module, "_connected", {})
    connect = agent_module.connect
    assert connect(tmp_path, "law", name="a", max_num_seqs=2) == ({"max_num_seqs": 2}, "law", "a")
    connect(tmp_path / "." / "", "summary", max_num_seqs=2)
    assert len(made) == 1
    connect(tmp_path, max_num_seqs=3)
    assert len(made) == 2


def test_the_keeper_of_functions_ends_with_its_agent():
    agent = bare(_room=Room(None))
    thread = threading.Thread(target=_keep, args=(weakref.ref(agent), threading.Event(), 0.01))
    thread.start()
    del agent
    thread.join(60)
    assert not thread.is_alive()


def test_the_backbone_is_hashed_when_a_process_has_ended_and_not_at_a_first_start():
    looks = []
    running = SimpleNamespace(about={"private_bytes": 1, "start_s": 1.0})
    parts = {"_guard": SimpleNamespace(look=lambda: looks.append(1)), "_room": Room(None)}
    agent = bare(**parts, _tenants=SimpleNamespace(start=lambda name, folder: running))
    function = SimpleNamespace(starts=0)
    vars(agent)["_functions"] = {"law": function}
    for function.starts in (0, 1):
        agent._start("law", None)
        assert len(looks) == function.starts


@pytest.mark.long
def test_a_function_with_a_task_head_reads_programs_that_a_process_without_it_made(
    agent, monkeypatch
):
    """As in the jail of a GPU, where nothing compiles."""
    monkeypatch.setattr(jail, "stops_compiling", lambda device: True)
    with agent.function(next((MODEL / "heads").iterdir()), name="headed") as function:
        assert answers(function.generate(PROMPTS[0], SAMPLING))
    del vars(agent)["_functions"]["headed"]


def test_only_digests_from_processes_with_an_engine_name_the_steps_of_the_next_one():
    """The next one unpickles the files of these names."""
    said, ends, orders = [], [], []

    def fork(facts):
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        send_header(theirs, {"ready": True, "steps": said[-1]})
        return ours, os.getpid()

    send = lambda connection, order: orders.append(order["steps"])  # noqa: E731
    parts = {"_published": SimpleNamespace(device="cpu", send=send), "_room": Room(None)}
    parts |= {"_zygote": SimpleNamespace(fork=fork), "_turns": None, "_tenant_sizes": None}
    parts |= {"model": "m", "_fields": {}, "_http": None, "_isolation": "process", "_slo_s": None}
    agent, (first, guards, tenants, last) = bare(**parts, _steps=[]), (c * 64 for c in "abcd")
    for steps, kind, backbone in (
        ([first, "../budgets/planted", "/tmp/planted", 5, [[]]], {}, True),
        (5, {}, True),
        ([[]], {}, True),
        ([guards], {"guard": True}, True),
        ([tenants], {"tenant": True}, False),
        ([last], {}, True),
    ):
        said.append(steps)
        agent._launch({"name": "f", "adapter": None, **kind}, backbone=backbone)[0].close()
    assert orders == [[], [first], [first], [first], [first]]
    assert agent._steps == [last]
    for end in ends:
        end.close()


GPU_LIMITS = {"memory_bytes": None, "gpus": True}


@pytest.mark.parametrize(
    ("device", "asked", "isolation", "order", "limits"),
    [
        ("cpu", "", "process", {"programs": {"writes": True}}, {"memory_bytes": 7, "gpus": False}),
        ("cpu", "", "none", {"programs": None}, None),
        ("gpu", "0", "process", {"programs": {"writes": False}}, None),
        (
            "gpu",
            "",
            "process",
            {"programs": {"writes": False}},
            {"memory_bytes": None, "gpus": True},
        ),
        ("gpu", "", "process", {"programs": {"writes": True}}, None),  # XLA's assembler starts
        ("gpu", "", "process", {"programs": {"writes": False}, "guard": {"every_s": 1}}, None),
    ],
)
def test_which_processes_are_in_a_jail(device, asked, isolation, order, limits, monkeypatch):
    monkeypatch.setenv(jail.GPU_JAIL, asked)
    assert jail.limits(order, isolation, device, 7) == limits


class Watched:
    """A function as the keep-alive thread sees it."""

    def __init__(self, arrivals: tuple[float, ...], is_offloaded: bool):
        self.arrivals, self.is_offloaded = arrivals, is_offloaded
        self.told: dict[str, threading.Event] = {n: threading.Event() for n in ("offload", "warm")}

    def offload(self) -> None:
        self.told["offload"].set()

    def warm(self) -> None:
        self.told["warm"].set()


def test_functions_that_nobody_calls_lose_their_process_and_expected_ones_get_theirs():
    """Called long ago: offloaded. Called each 1000 s, last 500 s ago: started ahead."""
    now = time.monotonic()
    idle = Watched((now - 1e6, now - 1e6 + 1), False)
    expected = Watched((now - 1500, now - 500), True)
    closing = threading.Event()
    agent = bare(_functions={"idle": idle, "expected": expected}, _room=Room(None))
    args = weakref.ref(agent), closing, 0.01
    thread = threading.Thread(target=_keep, args=args)
    thread.start()
    assert idle.told["offload"].wait(60)
    assert expected.told["warm"].wait(60)
    closing.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not idle.told["warm"].is_set()
    assert not expected.told["offload"].is_set()


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
        ({"max_tenants": 4}, "a size of isolation 'server' and 'none'"),
        ({"isolation": "server", "ttft_slo_s": 1.0}, "batches them all"),
        ({"verify_s": 0.0}, "verify_s must be in"),
    ):
        with pytest.raises(ValueError, match=words):
            Agent(MODEL, **fields)
    assert agent.functions["law"].generate("a", SAMPLING)


def test_the_agent_needs_no_jax():
    code = (
        "import sys; from serving.functions import Agent, connect; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
