"""An agent of its parts alone: starts, names, failover, shared backbones, idle functions."""

import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from serving.functions import Agent
from serving.functions import agent as agent_module
from serving.functions.agent import _keep
from serving.functions.handle import FunctionRefused
from serving.functions.policies.predict import Arrivals
from serving.functions.processes import Ends
from serving.functions.room import Room
from serving.functions.running import Running


def bare(**parts) -> Agent:
    """Return an agent of these parts alone."""
    agent = Agent.__new__(Agent)
    empty = {"_functions": {}, "_folders": {}, "_read": {}, "_ends": Ends()}
    empty["_naming"] = threading.Lock()
    empty["_seen"] = SimpleNamespace(bytes_of=lambda pid, said: said)
    vars(agent).update(empty | {"_tenants": None, "_closing": threading.Event()} | parts)
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
        assert not wait([same], 0.05).done  # until there is a process
        assert agent.function(name="slow", lazy=True).state == "starting"
        assert agent.function(name="quick").state == "running"
        with pytest.raises(ValueError, match="rank 99"):
            agent.function(name="bad")
        go.set()
        assert same.result(60) is slow.result(60)
    assert {*agent.functions} == {"slow", "quick"}
    for one in (*agent.functions.values(), *ends):
        one.close()


def test_a_function_that_ran_out_of_its_memory_is_known_by_its_adapter():
    """Then the next process of that adapter has more."""
    lacked, (ours, theirs) = [], socket.socketpair()
    about = {"private_bytes": 1, "start_s": 1.0}
    maker = SimpleNamespace(start=lambda *_, **__: (ours, 1, about), lacked=lacked.append)
    base = SimpleNamespace(device="cpu")
    parts = {"_maker": maker, "_published": base, "_room": Room(None), "_guard": None}
    with ours, theirs:
        bare(_fields={}, **parts)._start("law", "adapters/law").on_lack()
    assert lacked == ["adapters/law"]


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


def test_with_a_changed_backbone_the_shared_engine_and_every_function_end():
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs must be in \[1, 1024\], got 0"),
        ({"max_lora_rank": "8"}, "max_lora_rank must be an integer, got '8'"),
        ({"dtype": "float13"}, "dtype must be one of auto, float32, bfloat16, got 'float13'"),
        ({"keep_alive_s": "5"}, "keep_alive_s must be in .* got '5'"),
        ({"memory_bytes": -5}, "memory_bytes must be an integer at least 1"),
    ],
)
def test_sizes_that_no_engine_takes_are_refused_before_anything_is_loaded(
    fields, words, tmp_path, monkeypatch
):
    monkeypatch.delattr(agent_module, "Zygote")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=words):
        Agent(tmp_path, **fields)


def test_the_dtype_auto_is_the_checkpoint_s(tmp_path, monkeypatch):
    asked = []

    def publish(model, dtype):
        asked.append(dtype)
        raise ConnectionError

    quiet = SimpleNamespace(kill=lambda: None, close=lambda: None)
    monkeypatch.setattr(agent_module, "Zygote", lambda: quiet)
    monkeypatch.setattr(agent_module, "Published", publish)
    (tmp_path / "config.json").write_text("{}")
    for dtype in ("auto", None, "bfloat16"):
        with pytest.raises(ConnectionError):
            Agent(tmp_path, dtype=dtype)
    assert asked == [None, None, "bfloat16"]


@pytest.mark.parametrize(
    ("device", "gpus", "options", "words"),
    [
        ("gpu", "0", {}, "takes two GPUs.*sees 1 .CUDA_VISIBLE_DEVICES is 0.*isolation 'process'"),
        ("gpu", "0,1", {"tenant_processes": "each"}, "'each' is for CPUs"),
        ("tpu", "0,1", {}, "runs on CPUs and GPUs, not on tpu: use 'process'"),
    ],
)
def test_devices_that_do_not_serve_isolation_server_are_refused_before_a_function_starts(
    device, gpus, options, words, tmp_path, monkeypatch
):
    closed = []
    zygote = SimpleNamespace(kill=lambda: None, close=lambda: None)
    published = SimpleNamespace(device=device, num_bytes=0, close=lambda: closed.append("backbone"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(agent_module, "Zygote", lambda: zygote)
    monkeypatch.setattr(agent_module, "Published", lambda *given: published)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=words):
        Agent(tmp_path, isolation="server", **options)
    assert closed == ["backbone"]


def test_a_function_that_was_closed_is_made_anew_under_its_name(tmp_path):
    """`with lora_jax.function(path) as fn` twice in one program."""
    ends = []

    def start(name, folder):
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return Running(ours, len(ends), {})

    agent = bare(_start=start)
    with agent.function(tmp_path / "law") as first:
        assert agent.function(tmp_path / "law") is first
    with agent.function(tmp_path / "law") as second:
        assert second is not first
        assert second.state == "running"
        assert agent.functions == {"law": second}
    for end in ends:
        end.close()


def test_a_link_that_leads_elsewhere_is_followed_by_the_next_process(tmp_path):
    """As a deployment by a link has it: the name stays, its folder is another one."""
    for version in ("law-1", "law-2"):
        (tmp_path / version).mkdir()
    link, ends, read = tmp_path / "law", [], []
    link.symlink_to("law-1")

    def start(name, folder):
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        read.append(folder)
        return Running(ours, len(ends), {})

    agent = bare(_start=start)
    function = agent.function(link, name="law")
    link.unlink()
    link.symlink_to("law-2")
    assert agent.function(link, name="law", lazy=True) is function
    assert function.pid == 2
    assert agent.function(link, name="law", lazy=True).pid == 2
    assert agent.function(tmp_path / "law-2", name="law", lazy=True) is function
    assert read == [str(tmp_path / "law-1"), str(tmp_path / "law-2")]
    with pytest.raises(ValueError, match=r"'law' has the adapter .*law, not .*law-1: give another"):
        agent.function(tmp_path / "law-1", name="law")
    function.close()
    for end in ends:
        end.close()


def test_names_of_functions_that_are_taken_or_none(tmp_path):
    agent = bare()
    agent.function(tmp_path / "base", lazy=True)
    with pytest.raises(ValueError, match=r"'base' has the adapter /.*base, not the base model"):
        agent.function()
    with pytest.raises(TypeError, match="name of a function must be a str, got 5"):
        agent.function(name=5)


def test_an_agent_that_is_closed_and_an_esft_adapter_are_told_before_a_process_starts(tmp_path):
    (tmp_path / "expert_cfg.json").touch()
    agent = bare()
    with pytest.raises(
        ValueError, match=f"{tmp_path} is an ESFT adapter, and functions serve LoRA"
    ):
        agent.function(tmp_path)
    agent._closing.set()
    with pytest.raises(ConnectionError, match="The agent is closed: make another one"):
        agent.function(name="law")
    assert agent.functions == {}
    lazy = agent.function(tmp_path, name="lazy", lazy=True)  # as a front's: its calls are refused
    agent._closing.clear()
    with pytest.raises(FunctionRefused, match="is an ESFT adapter"):
        lazy.warm()


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
    connect(tmp_path, dtype=float)  # no JSON; an agent refuses it by name
    assert made[-1] == {"dtype": float}


def test_the_keeper_of_functions_ends_with_its_agent():
    agent = bare(_room=Room(None))
    thread = threading.Thread(target=_keep, args=(weakref.ref(agent), threading.Event(), 0.01))
    thread.start()
    del agent
    thread.join(60)
    assert not thread.is_alive()


def test_the_backbone_is_hashed_when_a_process_has_ended_and_not_at_a_first_start():
    looks = []
    running = SimpleNamespace(about={"private_bytes": 1, "start_s": 1.0}, own_pid=5)
    parts = {"_guard": SimpleNamespace(look=lambda: looks.append(1)), "_room": Room(None)}
    agent = bare(**parts, _tenants=SimpleNamespace(start=lambda name, folder: running))
    function = SimpleNamespace(starts=0)
    vars(agent)["_functions"] = {"law": function}
    for function.starts in (0, 1):
        agent._start("law", None)
        assert len(looks) == function.starts


def test_a_function_starts_in_room_that_is_made_for_it_and_says_what_it_has_come_to_hold():
    noted, about = [], {"private_bytes": 5, "start_s": 1.0}
    ours, theirs = socket.socketpair()
    room = SimpleNamespace(
        make=lambda name, functions: noted.append(("make", name)),
        ready=lambda *given: noted.append(("ready", *given)),
        grown=lambda *given: noted.append(("grown", *given)),
    )

    def start(*_, **__):
        noted.append("start")
        return ours, 1, about

    maker = SimpleNamespace(start=start, lacked=noted.append)
    parts = {"_maker": maker, "_published": SimpleNamespace(device="cpu"), "_room": room}
    with ours, theirs:
        parts["_seen"] = SimpleNamespace(bytes_of=lambda pid, said: (pid, said))
        bare(_fields={}, _guard=None, **parts)._start("law", "l").on_grown(9)
    assert noted[:3] == [("make", "law"), "start", ("grown", "law", (1, 5))]
    what, name, start_s = noted[3]
    assert (what, name) == ("ready", "law")
    assert start_s < 1  # it was ready sooner than it says
    assert noted[4:] == [("grown", "law", (1, 9))]


def test_what_an_agent_started_ends_with_it():
    closed, kinds = [], ("_guard", "_tenants", "_zygote", "turns", "_published")
    parts = {kind: SimpleNamespace(close=lambda kind=kind: closed.append(kind)) for kind in kinds}
    agent = bare(**parts, _functions={"law": SimpleNamespace(close=lambda: closed.append("law"))})
    agent.close()
    assert closed == ["_guard", "law", "_tenants", "_zygote", "turns", "_published"]
    assert agent.functions == {}
    assert agent._closing.is_set()


LEFT = """
from serving.functions import agent
class Left(agent.Agent):
    def __init__(self):
        pass
    def close(self):
        print("closed", flush=True)
left = Left()
agent._agents.add(left)
"""


def test_an_agent_that_nobody_closed_is_closed_with_its_program():
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert done.stdout == "closed\n", done.stderr


class Watched:
    """A function as the keep-alive thread sees it."""

    def __init__(self, arrivals: tuple[float, ...], is_offloaded: bool):
        self.arrivals, self.is_offloaded = Arrivals(arrivals), is_offloaded
        self.told: dict[str, threading.Event] = {n: threading.Event() for n in ("offload", "warm")}

    def offload(self) -> None:
        self.told["offload"].set()

    def warm(self) -> None:
        self.told["warm"].set()


def test_a_function_that_does_not_start_ahead_of_its_call_harms_no_other_and_none_starts_late():
    """Those of one look: the first one fails, the second one starts, then the agent is closed."""
    now = time.monotonic()
    functions = {n: Watched((now - 1500, now - 500), True) for n in ("bad", "good", "late")}
    closing = threading.Event()

    def fail():
        raise ConnectionError("no process")

    functions["bad"].warm = fail
    functions["good"].warm = closing.set
    agent = bare(_functions=functions, _room=Room(None))
    _keep(weakref.ref(agent), closing, 0.01)
    assert not functions["late"].told["warm"].is_set()


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
