"""The simulator: every call is answered in order of time, and known cases have known figures."""

import json
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest
from support.processes.server_process import ROOT

from bench.functions import (
    calibration,
    device_functions,
    device_pages,
    hand_overs,
    isolation,
    measured,
    sweeps,
)
from bench.functions.exact import best_value
from bench.functions.policies import agent_bytes, instance, measure_decisions
from bench.functions.run import simulate
from bench.functions.systems import ABLATIONS, SYSTEMS, System
from bench.functions.times import Times, read_times
from bench.functions.traces import spread, thinned
from serving import Sampling
from serving.functions.policies.preload import plan, value_of
from serving.functions.turns.log import Stamps, Turn


def arrivals(seed: int, functions: int = 4, rate: float = 0.02) -> list[list[float]]:
    rng, found = random.Random(seed), []
    for _ in range(functions):
        moments, now = [], 0.0
        while (now := now + rng.expovariate(rate)) < 3600:
            moments.append(now)
        found.append(moments)
    return found


def test_a_decision_takes_microseconds_and_an_agent_needs_no_jax():
    """The targets are 1 ms and 300 MB."""
    taken = measure_decisions()
    assert 0 < taken["batch_s"] < 1e-3
    assert 0 < taken["turn_s"] < 1e-3
    assert 10e6 < agent_bytes() < 300e6


SWITCHED = [pytest.param(system, marks=pytest.mark.long) for system in ABLATIONS[1:]]


@pytest.mark.parametrize("system", [*SYSTEMS, *SWITCHED], ids=lambda system: system.name)
def test_all_calls_are_answered_not_before_they_came(system):
    calls = arrivals(1)
    row = simulate(system, Times(), calls)
    assert row["requests"] == sum(map(len, calls))
    assert row["mean_ttft_s"] >= 0.5
    assert row["mean_e2e_s"] >= row["mean_ttft_s"] + 99 * 0.024 - 1e-6
    assert 0 <= row["slo_violations"] <= 1
    assert 0 < row["dollars"] <= row["dollars_with_idle_backbone"]


def test_a_lone_call_with_everything_there_takes_one_prefill():
    row = simulate(System("x", always_on=True), Times(), [[5.0], [9.0]])
    assert row["mean_ttft_s"] == pytest.approx((0.5 + 0.8) / 2)
    assert row["mean_e2e_s"] == pytest.approx((0.5 + 0.8) / 2 + 99 * 0.024)
    assert row["pre_loading_hits"] == 1


def test_a_cold_start_loads_each_part_one_after_the_other():
    """Libraries, context, backbone and adapter from storage; and the bill is for that time."""
    times = Times()
    row = simulate(System("x", preloads=False), times, [[5.0], []])
    cold = 13.5 / 2 + 3.0 + 1.5 + 0.1 / 2
    assert row["mean_ttft_s"] == pytest.approx(cold + 0.5)
    assert row["pre_loading_hits"] == 0
    busy = cold + 0.5 + 99 * 0.024
    units = 1.5 * (13.5 * (busy - 13.5 / 2) + 0.573 * busy + 0.08 * (busy - cold)) + busy
    units += 0.25 * 0.573 * 62 + 0.15 * 1.5 * busy + 75 / 10_000
    assert row["dollars"] == pytest.approx(units * 0.00002, rel=0.02)


def test_two_functions_that_decode_share_the_device():
    """Each takes twice as long from where both decode."""
    times = Times(devices_per_model=1)
    alone = simulate(System("x", always_on=True), times, [[5.0], [], [], []])
    both = simulate(System("x", always_on=True), times, [[5.0], [5.0], [], []])
    assert alone["mean_e2e_s"] == pytest.approx(0.5 + 2.376)
    assert both["mean_e2e_s"] == pytest.approx(1.0 + 2 * 2.376)


def test_regular_calls_are_pre_loaded():
    calls = [[60.0 * i for i in range(1, 60)], []]
    switched = {p: simulate(System("x", preloads=p), Times(keep_alive_s=5), calls) for p in (0, 1)}
    assert switched[1]["pre_loading_hits"] > 0.9 > switched[0]["pre_loading_hits"] == 0
    assert switched[1]["mean_ttft_s"] < switched[0]["mean_ttft_s"]


def test_calls_of_a_minute_are_spread_over_it():
    moments = spread([2, 0, 3], random.Random(0))
    assert len(moments) == 5
    assert [int(m // 60) for m in moments] == [0, 0, 2, 2, 2]
    assert set(thinned(moments, 0.5, random.Random(1))) < set(moments)


def test_times_of_a_file_replace_the_assumed_ones(tmp_path):
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"fork_s": 0.5}))
    assert read_times(file).fork_s == 0.5
    assert read_times(None) == Times()
    file.write_text(json.dumps({"nonsense": 1}))
    with pytest.raises(ValueError, match=r"times\.json: nonsense"):
        read_times(file)


def test_the_greedy_plan_is_within_its_bar_of_the_best():
    """Where the best is found at once: 4 backbones, 12 functions, 4 and 4 places."""
    case = instance(3, functions=12, backbones=4, places=4)
    best, bound = best_value(*case, limit_s=20)
    value = value_of(plan(*case), *case)
    assert value <= bound + 1e-6
    assert value >= (1 - 0.016) * best


def test_measured_times_are_what_the_simulator_reads(tmp_path):
    line = {"base_s": 0.25, "slope_s": 0.125}
    model = {"name": "tiny", "backbone_gb": 0.5, "prefill": line, "slo_s": 1.0}
    model |= {"decode_step_s": 0.01, "kv_gb": 0.01, "largest_batch": 4}
    file = tmp_path / "functions_measured.json"
    file.write_text(json.dumps({"measured": {"times": {"models": [model], "answer_tokens": 11}}}))
    times = read_times(file)
    assert (times.models[0].prefill.seconds(3), times.answer_tokens) == (0.5, 11)
    row = simulate(System("x", always_on=True), times, [[1.0]])
    assert row["mean_e2e_s"] == pytest.approx(0.25 + 10 * 0.01)
    assert row["mean_tpot_s"] == pytest.approx(0.01)


def test_a_device_that_is_billed_whole_costs_its_memory_for_all_the_time():
    row = simulate(System("x", always_on=True), Times(), [[5.0], []])
    assert row["dollars_whole_device"] == pytest.approx(2 * 48 * 14400 * 1.5 * 0.00002)


def test_batches_of_one_backbone_are_as_large_as_memory_allows():
    model = Times().models[0]
    shared, private, more, most = sweeps.peak_batches(Times())
    assert private["peak_batch"] == 32
    assert shared["peak_batch"] == int(32 + 13.5 / 2 / model.kv_gb)
    assert most["device_gb"] == 48.0
    assert more["peak_batch"] == int((48 - 13.5 - 2 * 0.573) / 2 / model.kv_gb)
    seconds = model.prefill.seconds(32) + 99 * model.decode_step_s
    assert private["tokens_per_s"] == pytest.approx(32 * 100 / seconds)


def test_at_the_papers_load_a_shared_engine_costs_more_and_no_switch_is_free(monkeypatch):
    """By four calls of each function in place of the traces."""
    calls = [[60.0 * (8 * number + at) for number in range(4)] for at in range(8)]
    monkeypatch.setattr(sweeps, "read_classes", lambda traces: {"normal": calls})
    monkeypatch.setattr(sweeps, "PAPERS_SHARE", 1.0)
    found = sweeps.papers_load(None, Times())
    costs = {row["system"]: row["dollars"] for row in found["papers_load"]}
    assert costs["functions"] < 0.1 * costs["model of one shared engine"]
    names = [row["system"] for row in found["tight_switches"]]
    assert names[0] == "functions"
    assert "without offloading" in names


def test_calls_of_a_slice_are_made_at_their_times():
    class Streaming:
        def __init__(self):
            self.calls = []

        def stream(self, prompt, sampling):
            self.calls.append(time.perf_counter())
            yield from "ab"

    functions, start = [Streaming(), Streaming()], time.perf_counter()
    found = calibration._run(functions, [[0.0, 0.05], [0.1]])
    assert [len(function.calls) for function in functions] == [2, 1]
    assert functions[1].calls[0] >= start + 0.2
    assert 0 <= found["mean_ttft_s"] <= found["mean_e2e_s"]


@pytest.mark.long
def test_pages_are_attached_by_others_and_outlive_their_owner():
    """As on a device, over host memory here; what writes do there, only a device can say."""
    row, last = device_pages.measure([0.01, 0.01], [2])
    assert row["reads_right"]
    assert row["orphan_reads_right"]
    assert len(row["attach_s"]) == 2
    assert last["write_copy"].startswith("refused: NotImplementedError: host memory")


@pytest.mark.long
def test_one_backbone_leaves_room_for_larger_batches():
    """As on a device, with a small shape here, where no functions have turns."""
    parts = ("batches", "slicing")
    found = device_functions.measure("small", [1, 2], 0.2, parts, told=lambda line: None)
    shared, private = found["batches"]["shared"], found["batches"]["private"]
    assert private["batch"] == 32 < shared["batch"]
    assert min(private["tokens_per_s"], shared["tokens_per_s"]) > 0
    assert [row["functions"] for row in found["slicing"]] == [1, 2, 1, 2]
    assert all(row["p95_ttft_ms"] > 0 and row["streams"] > 0 for row in found["slicing"])


def test_copies_of_an_adapter_differ_by_their_digest(tmp_path):
    folders = isolation.copies(ROOT / "assets" / "tiny-moe" / "adapters" / "law", tmp_path, 3)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    assert len({config["lora_alpha"] for config in configs}) == 3
    assert all((folder / "adapter_model.safetensors").is_file() for folder in folders)


class Answering:
    """A function whose answers have 3 tokens, and whose process starts at once."""

    def __init__(self):
        self.calls, self.offloads = 0, 0
        self.start_times = {"attach_s": 0.0, "start_s": 0.25}
        self.prompts, self.num_warmed = set(), 0
        self.is_off, self.num_looks_off = False, 0

    @property
    def pid(self):
        """Starts a process, as that of a function does, which no measured start may do."""
        self.num_looks_off += self.is_off
        self.is_off = False
        return os.getpid()

    def generate(self, prompts, sampling):
        self.calls, self.is_off = self.calls + 1, False
        many = [prompts] if isinstance(prompts, str) else prompts
        self.prompts.update(many)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2, 3))]) for _ in many]

    def offload(self):
        self.offloads, self.is_off = self.offloads + 1, True

    def warm(self):
        self.num_warmed, self.is_off = self.num_warmed + 1, False


def test_starts_are_measured_from_zero_and_rates_count_every_token(monkeypatch):
    monkeypatch.setattr(measured, "_AHEAD_S", 0.0)
    function = Answering()
    found = measured._starts(function)
    assert (found["ready_s"], function.offloads, function.num_warmed) == (0.25, 10, 5)
    assert len(found["preloaded_s"]) == len(found["preloaded_processor_s"]) == 3
    assert function.num_looks_off == 0
    assert len(function.prompts) == function.calls  # a call finds no other one's prefix
    both, start = [Answering(), Answering()], time.perf_counter()
    rate = measured.token_rate(both, ["a prompt"] * 8, Sampling(), 0.05)
    most = sum(f.calls for f in both) * 24 / 0.05
    assert most / (time.perf_counter() - start) * 0.05 <= rate <= most


class Clock(threading.local):
    """A clock of each thread, which stands until the thread advances it."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_first_tokens_are_timed_and_the_rest_of_a_stream_is_waited_for(monkeypatch):
    prompts, clock = [], Clock()
    monkeypatch.setattr(measured, "time", clock)

    class Streaming:
        def stream(self, prompt, sampling):
            prompts.append(prompt)
            clock.now += 0.02
            yield "a"
            clock.now += 0.1
            yield "b"

    found = measured.first_tokens([Streaming(), Streaming()], 0.15)
    assert len(found) == len(set(prompts)) == 4  # two each, one after the other
    assert found == pytest.approx([0.02] * 4)


def test_the_parts_of_a_hand_over_are_those_between_two_functions_turns():
    def turn(name, granted, recalled, *stamps, back, ended):
        return Turn(name, granted, recalled, back, ended, Stamps(*stamps))

    turns = [
        turn("a", 0.0, 0.0, 0.0, 0.5, 0.0, 1.0, back=1.0, ended=1.0),  # nobody asked it back
        turn("a", 1.0, 2.0, 1.0, 1.25, 2.25, 2.5, back=2.625, ended=4.0),
        turn("b", 2.75, 5.0, 3.0, 3.5, 5.5, 5.5, back=5.625, ended=6.0),
        turn("a", 5.75, 8.0, 6.0, 7.0, 0.0, 0.0, back=0.0, ended=0.0),  # it goes on
    ]
    assert hand_overs.summary(turns[:2]) == {}
    found = hand_overs.summary(turns)
    assert (found["hand_overs"], found["turn"]) == (2, 2000.0)
    assert found["recalled_to_noticed"] == 375.0  # 0.25 and 0.5 s
    assert found["noticed_to_passed"] == 125.0
    assert found["passed_to_ended"] == 1000.0
    assert found["heard_to_dispatched"] == 750.0
    assert found["idle"] == 500.0  # of 0 and 1 s: the first hand-over was hidden
    assert found["idle_share"] == 0.2
