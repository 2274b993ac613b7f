"""Two instances share a LoRA Server of real processes, which are killed and come back."""

import contextlib
import functools
import itertools
import os
import signal
import threading
import time

import pytest
from support.cases import lora_server_cases as cases
from support.cases.engine_cases import settle
from support.waiting import wait_until

from bench.ablation.instance import Instance, Setup
from lora_jax.adapters.kinds import AdapterKind
from serving import Engine, Sampling
from serving.api.cluster_config import ClusterConfig
from serving.cluster.server_place import ServerPlace
from serving.lora_server.group import ServerGroup
from serving.lora_server.instance import ServerAccess
from serving.lora_server.transport import selection

SCORED = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
LONG = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=1)
MIXED = ["a0", None, "a1", "a2", None, "a0", "a3", "a1", None, "a2"]
WAIT_S = 1.0  # one exchange; a killed rank is known at once, a stopped one only so
PROMPTS = cases.prompts_of(len(MIXED))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def coupled(files):
    with Engine(files[0], files[1], **cases.ENGINE) as engine:
        yield answers(engine, MIXED, SCORED), answers(engine, MIXED, LONG)


@pytest.fixture(scope="module")
def group(files):
    made = ServerGroup(cases.make_spec(files[0], "ep2-pp1"))
    processes = made.processes
    yield made
    counts = [process.stats() for process in made.processes]
    paths = [place.address for place in made.places]
    folder = os.path.dirname(paths[0])
    made.close()
    made.close()
    assert not any(os.path.exists(path) for path in (*paths, folder))
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    assert all(count["compilations"] == 0 for count in counts)


def access(group, name, wait_s=WAIT_S, local_slots=0):
    return ServerAccess(
        group.spec,
        name,
        group.coordinator,
        lambda terms, device: selection.open_client_at(group.places, terms, device=device),
        wait_s,
        local_slots,
    )


@pytest.fixture(scope="module")
def engines(group, files):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Engine(*files, lora_server=access(group, name), **cases.ENGINE))
            for name in ("one", "two")
        ]


def answers(engine, adapters, sampling):
    outputs = engine.generate(PROMPTS[: len(adapters)], adapters, sampling)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.long
def test_two_instances_answer_as_a_coupled_engine_does(engines, group, coupled):
    found = [None, None]

    def run(place):
        found[place] = answers(engines[place], MIXED, SCORED)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [coupled[0]] * 2
    assert all(process.stats()["answered"] > 0 for process in group.processes)
    for engine in engines:
        assert engine.stats().compilations_after_warmup == 0


@pytest.mark.slow
def test_so_they_do_over_four_ranks(files, coupled):
    group = ServerGroup(cases.make_spec(files[0], "ep2-pp2"))
    with contextlib.ExitStack() as stack:
        stack.callback(group.close)
        for name in ("one", "two"):
            options = {"lora_server": access(group, name), **cases.ENGINE}
            engine = stack.enter_context(Engine(*files, **options))
            assert answers(engine, MIXED, SCORED) == coupled[0]
        assert all(process.stats()["answered"] > 0 for process in group.processes)


def ask(engine, place, adapter):
    return cases.Asked(engine, PROMPTS[place], adapter, LONG)


class Gate:
    """Holds back the restart of a dead rank while it is closed."""

    def __init__(self, group, monkeypatch):
        self.open, replace = threading.Event(), group._replace

        def gated(dead):
            group.coordinator.lose(dead.rank)
            self.open.wait(60)
            replace(dead)

        monkeypatch.setattr(group, "_replace", gated)


def fault_round(group, engines, coupled, monkeypatch, hurt):
    """Hurt a rank under load; return the seconds until the last affected request had its answer."""
    want = [list(tokens) for tokens, *_ in coupled[1]]
    with monkeypatch.context() as patch:
        gate = Gate(group, patch)
        asked = [
            [ask(engine, place, adapter) for place, adapter in enumerate(MIXED[:6])]
            for engine in engines
        ]
        for row in asked:
            assert all(one.started.wait(60) for one in row)
        hurt()
        begun = time.monotonic()
        late = [ask(engine, 0, "a0") for engine in engines]
        failed = [cases.check_ended(one, want[0]) for one in late]
        for row in asked:
            for place, one in enumerate(row):
                error = cases.check_ended(one, want[place])
                assert not (error and one.adapter is None), "a request of the base model failed"
        seconds = time.monotonic() - begun
        assert all(failed), "an adapter was answered without its server"
        base = [cases.check_ended(ask(engine, 1, None), want[1]) for engine in engines]
        assert not any(base)
        gate.open.set()
        for engine in engines:
            cases.answer_again(functools.partial(ask, engine, 0, "a0"), want[0])
    for engine in engines:
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0
        assert answers(engine, MIXED, SCORED) == coupled[0]
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("turn", range(3))
def test_a_rank_is_killed_and_comes_back(turn, engines, group, coupled, monkeypatch):
    victim = group.processes[turn % 2].pid
    fault_round(group, engines, coupled, monkeypatch, lambda: os.kill(victim, signal.SIGKILL))
    assert group.processes[turn % 2].pid != victim


@pytest.mark.long
def test_all_ranks_are_killed_and_come_back(engines, group, coupled, monkeypatch):
    victims = [process.pid for process in group.processes]

    def kill():
        for victim in victims:
            os.kill(victim, signal.SIGKILL)

    fault_round(group, engines, coupled, monkeypatch, kill)
    assert not {process.pid for process in group.processes} & set(victims)


@pytest.mark.long
def test_a_rank_hangs_and_is_replaced(engines, group, coupled, monkeypatch):
    """Before: it was waited for as long as it was stopped."""
    rank = group.processes[1].pid
    fault_round(group, engines, coupled, monkeypatch, lambda: os.kill(rank, signal.SIGSTOP))
    assert group.processes[1].pid != rank
    wait_until(lambda: group.up() == [True, True])


@pytest.fixture(scope="module")
def stand_in(group, files):
    """An instance that can take over two adapters."""
    with Engine(
        *files, lora_server=access(group, "three", local_slots=2), **cases.ENGINE
    ) as engine:
        yield engine


@pytest.mark.long
def test_an_instance_takes_over_while_the_server_is_lost(
    stand_in, group, files, coupled, monkeypatch
):
    """All tokens, those told before the kill and those after, are those of a coupled engine."""
    want = [list(tokens) for tokens, *_ in coupled[1]]
    remote = stand_in._parts.residencies.of(AdapterKind.LORA).server

    def asked_of(*places):
        return [(ask(stand_in, place, MIXED[place]), want[place]) for place in places]

    def failed(asked):
        return [cases.check_ended(one, tokens) for one, tokens in asked]

    assert answers(stand_in, MIXED, SCORED) == coupled[0]
    with monkeypatch.context() as patch:
        gate = Gate(group, patch)
        asked = asked_of(0, 1, 2, 7, 8)
        assert all(one.started.wait(60) for one, _ in asked)
        os.kill(group.processes[0].pid, signal.SIGKILL)
        assert not any(failed(asked))
        assert not any(failed(asked_of(0, 5, 7, 1)))
        assert remote.link.client.lost() == (0,)
        # Of more adapters than there is room for, some are told to try again.
        assert not all(failed(asked_of(0, 2, 3, 5, 6, 7)))
        gate.open.set()
    for _ in range(600):
        if not remote.is_lost:
            break
        time.sleep(0.1)
    sent = remote.link.client.stats().pushes
    assert answers(stand_in, MIXED, SCORED) == coupled[0]
    assert remote.link.client.stats().pushes > sent
    settle(stand_in)
    assert stand_in.stats().compilations_after_warmup == 0


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def no_more_than(most, pids):
    return all(open_files(pid) <= count for pid, count in zip(pids, most, strict=True))


@pytest.mark.slow
def test_twenty_kills_in_a_row(engines, group, coupled, monkeypatch):
    files = open_files(os.getpid())
    for turn in range(20):
        victim = group.processes[turn % 2].pid
        seconds = fault_round(
            group, engines, coupled, monkeypatch, lambda v=victim: os.kill(v, signal.SIGKILL)
        )
        assert seconds < 2, f"round {turn}: {seconds:.1f} s"
    assert open_files(os.getpid()) <= files + 2


@pytest.mark.slow
def test_twenty_kills_that_a_request_does_not_notice(stand_in, group, coupled, monkeypatch):
    """Adapters for which there is room lose no token and wait less than two seconds for any."""
    want, places = [list(tokens) for tokens, *_ in coupled[1]], (0, 1, 2, 5, 7, 8)
    remote, files = stand_in._parts.residencies.of(AdapterKind.LORA).server, open_files(os.getpid())
    for turn in range(20):
        with monkeypatch.context() as patch:
            gate = Gate(group, patch)
            asked = [ask(stand_in, place, MIXED[place]) for place in places]
            assert all(one.started.wait(60) for one in asked)
            os.kill(group.processes[turn % 2].pid, signal.SIGKILL)
            asked += [ask(stand_in, place, MIXED[place]) for place in places]
            for one, place in zip(asked, places * 2, strict=True):
                assert not cases.check_ended(one, want[place])
                gaps = [b - a for a, b in itertools.pairwise(one.times)]
                assert max(gaps) < 2, f"turn {turn}, {one.adapter}: {max(gaps):.1f} s"
            gate.open.set()
        for _ in range(600):
            if not remote.is_lost:
                break
            time.sleep(0.1)
    settle(stand_in)
    assert open_files(os.getpid()) <= files + 2


@pytest.mark.slow
@pytest.mark.timeout(1200)  # each is started anew
def test_twenty_instances_that_are_killed_leave_nothing(engines, group, files, coupled):
    """Under load, while another instance goes on: their leases, slots and descriptors go."""
    place = ServerPlace(group.spec, group.places, ClusterConfig(lora_server=2))
    pids, most = [os.getpid(), *(process.pid for process in group.processes)], []
    want = [list(tokens) for tokens, *_ in coupled[1]]

    def holders():
        return {name for names in group.coordinator.held().values() for name in names}

    for turn in range(20):
        victim = Instance(Setup(0, *files, cases.ENGINE, place))
        victim.join(group.places, group.coordinator)
        victim.wait_ready(lambda told: None)
        name = f"instance-0 of process {victim.pid}"
        for number, prompt in enumerate(PROMPTS):
            victim.send(number, prompt, MIXED[number] or "a0", LONG.max_tokens)
        wait_until(lambda name=name: name in holders())
        asked = [ask(engines[0], number, MIXED[number]) for number in range(6)]
        os.kill(victim.pid, signal.SIGKILL)
        assert not any(map(cases.check_ended, asked, want)), f"turn {turn}: an error elsewhere"
        wait_until(lambda name=name: name not in holders())
        victim.close()
        most = most or [open_files(pid) + 2 for pid in pids]
        wait_until(functools.partial(no_more_than, most, pids))
    settle(engines[0])
    assert [process.pid for process in group.processes] == pids[1:]
