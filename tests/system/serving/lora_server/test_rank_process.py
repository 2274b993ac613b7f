"""A rank's main function over a pipe, here and in a process that cannot start."""

import dataclasses
import multiprocessing
import signal
import threading
import types

import pytest
from support.cases import lora_server_cases as cases
from support.doubles.held_host import HeldHost

from lora_jax.adapters import reader
from serving.lora_server import rank_process
from serving.lora_server.calls import Caller, RemoteRank, answer_calls
from serving.lora_server.parallel_calls import ParallelCaller
from serving.lora_server.rank_process import RankProcess, rank_main
from serving.lora_server.spec import design
from serving.lora_server.transport import shared_memory
from serving.lora_server.transport.selection import RankPlace
from serving.runtime.child_process import Pulse


@pytest.fixture
def files(tmp_path):
    return cases.write_files(tmp_path, 1)


def test_main_answers_until_its_connection_ends(files, tmp_path, monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(rank_process, "use_gpu", taken.append)
    model, adapters = files
    spec = cases.make_spec(model, "ep1-pp1", max_rows=8)
    made, path = design(spec), tmp_path / "rank"
    here, there = multiprocessing.Pipe()
    pulse, echo = multiprocessing.Pipe()
    fetching, fetched = multiprocessing.Pipe()
    failures = []

    def drive():
        caller = Caller(here)
        try:
            caller.call("ready")
            pulse.send_bytes(b"7")
            assert pulse.recv_bytes() == b"7"
            assert not path.exists()  # nobody finds it before it is opened
            caller.call("open")
            shared_memory.open_client([path], made.terms).close()
            digest = reader.read(cases.Path(adapters["a0"]), made.catalogue).digest
            rank = RemoteRank(caller, ParallelCaller(fetching))
            with pytest.raises(ValueError, match="cannot read"):
                rank.fetch("nowhere", digest)
            assert rank.fetch(adapters["a0"], digest).read_s > 0
            assert rank.load(4, adapters["a0"], digest, 1).read_s == 0
            rank.forget(digest)
            rank.unload(4, 2)
            assert caller.call("stats") == {"answered": 0, "refused": 0, "compilations": 0}
        except BaseException as error:
            failures.append(error)
        finally:
            caller.close()

    driver, before = threading.Thread(target=drive), signal.getsignal(signal.SIGINT)
    driver.start()
    try:
        rank_main(there, echo, fetched, spec, 0, RankPlace(str(path)), 5)
    finally:
        signal.signal(signal.SIGINT, before)
    driver.join(30)
    assert not failures
    assert taken == [5]
    assert not path.exists()


class Library:
    """Makes ids, and has worlds that do not begin."""

    def new_id(self, *, one_host):
        return b"one host" if one_host else b"several"

    def join(self, device, pe, size, world, slot_bytes, *, servers, one_host):
        assert (device, pe, size, world) == (0, 0, 3, b"one host")
        assert (servers, one_host) == (1, True)
        raise RuntimeError("error 7")


def test_a_rank_listens_before_it_joins_a_world_and_says_why_it_cannot(
    files, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(rank_process, "use_gpu", lambda gpu: None)
    monkeypatch.setattr(rank_process.world_library, "library", Library)
    spec = cases.make_spec(files[0], "ep1-pp1", max_rows=8, transport="nvshmem")
    path = tmp_path / "rank"
    here, there = multiprocessing.Pipe()
    _, echo = multiprocessing.Pipe()
    _fetching, fetched = multiprocessing.Pipe()
    said = []

    def drive():
        caller = Caller(here)
        try:
            said.append(caller.call("new_world", True))
            said.append((caller.call("listen"), path.exists()))
            caller.call("join", said[0], 1, 2, True, limit_s=60)
        except ConnectionError as error:
            said.append(str(error))
        finally:
            caller.close()

    driver, before = threading.Thread(target=drive), signal.getsignal(signal.SIGINT)
    driver.start()
    try:
        rank_main(there, echo, fetched, spec, 0, RankPlace(str(path)), 0)
    finally:
        signal.signal(signal.SIGINT, before)
    driver.join(30)
    assert said == [b"one host".hex(), (0, True), "PE 0 of 3: error 7"]
    assert "Rank 0 of the LoRA Server cannot start: PE 0 of 3: error 7" in caplog.text


def test_a_rank_that_cannot_start_is_told_of(tmp_path, capfd):
    process = RankProcess(
        cases.make_spec(str(tmp_path), "ep1-pp1"), 0, RankPlace(str(tmp_path / "rank"))
    )
    with pytest.raises(ConnectionError, match=r"Rank 0 .* did not start; its log says why"):
        process.wait_ready()
    process.stop()
    process.stop()
    said = capfd.readouterr().err
    assert "cannot start" in said
    assert "config.json" in said
    assert "Traceback" not in said


def test_adapters_must_fit_the_device(files, monkeypatch):
    made = design(cases.make_spec(files[0], "ep2-pp1"))
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": made.slot_bytes(0)})
    monkeypatch.setattr(rank_process.jax, "local_devices", lambda: [device])
    rank_process._require_memory(made, 0)
    larger = dataclasses.replace(made.spec, num_adapters=made.spec.num_adapters + 1)
    with pytest.raises(ValueError, match=r"EP2-PP1.*--lora-server-adapters.*or use more ranks"):
        rank_process._require_memory(design(larger), 0)


def test_a_rank_of_another_host_says_its_port_and_late_echoes_do_not_count():
    host = HeldHost("10.0.0.1")
    process = RankProcess("spec", 2, RankPlace(("10.0.0.1", 0), "secret"), 7, host)
    calls, pulse, _ = host.ends
    assert host.made[0].args[6] == 0  # the process sees its own GPUs only
    threading.Thread(
        target=answer_calls, args=(calls, {"open": lambda: 7001, "stats": lambda: {"answered": 3}})
    ).start()
    process.open()
    assert process.place == RankPlace(("10.0.0.1", 7001), "secret")
    assert process.stats() == {"answered": 3}
    pulse.send_bytes(b"0")  # to an earlier question
    assert process.pulse(0.05) is Pulse.SILENT
    assert pulse.recv_bytes() == b"1"
    pulse.send_bytes(b"1")
    pulse.send_bytes(b"2")
    assert process.pulse(5) is Pulse.UP
    process.kill()
    process.stop()
    host.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError("nixl is not installed"), "cannot start: nixl is not installed"),
        (KeyError("a bug"), "Rank 3 of the LoRA Server has failed."),
    ],
)
def test_a_loop_that_breaks_takes_its_process_with_it(monkeypatch, caplog, error, said):
    statuses = []

    def run():
        raise error

    monkeypatch.setattr(rank_process.os, "_exit", statuses.append)
    rank_process._run(types.SimpleNamespace(run=run, rank=3))
    assert statuses == [1]
    assert said in caplog.text
