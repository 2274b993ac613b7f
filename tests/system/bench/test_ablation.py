"""The ablation's requests are the same for every system, and its figures follow from the times."""

import contextlib
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases.engine_cases import settle

from bench.ablation import __main__ as ablation
from bench.ablation.instance import Told
from bench.ablation.prefilled import take_prompts_as_prefilled
from bench.ablation.system import STEPS, Split, System, homes, require_gpus
from bench.ablation.workload import (
    Job,
    Load,
    adapter_name,
    jobs,
    make_adapters,
    popularity,
    read_lengths,
    write_adapters,
)
from bench.report import plot_ablation
from lora_jax.adapters.dummy import DummyAdapters
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving import Engine, Sampling
from serving.api.cluster_config import ClusterConfig


def test_requests_come_by_poisson_and_adapters_by_zipf():
    load = Load(rate=50.0, seconds=40.0, adapters=10)
    work = jobs(load, 64)
    assert work == jobs(load, 64)
    assert len(work) == pytest.approx(2000, rel=0.1)
    assert [job.at for job in work] == sorted(job.at for job in work)
    assert all(4 <= len(job.prompt) <= 32 and 4 <= job.max_tokens <= 32 for job in work)
    counts = [sum(job.adapter == f"adapter-{n}" for job in work) for n in (0, 1, 9)]
    assert counts[0] > counts[1] > counts[2] > 0


def test_adapters_are_copies_that_differ(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "from" / name).mkdir(parents=True)
        (tmp_path / "from" / name / "adapter_config.json").write_text(json.dumps({"r": 1}))
        path = tmp_path / "from" / name / "adapter_model.safetensors"
        save_file({"a": np.ones(3, np.float32)}, path)
    made = write_adapters(tmp_path / "from", tmp_path / "to", 3)
    values = [load_file(f"{folder}/adapter_model.safetensors")["a"][0] for folder in made.values()]
    assert list(made) == ["adapter-0", "adapter-1", "adapter-2"]
    assert values == [1, 1 + 1 / 1024, 1 + 2 / 1024]


def test_lengths_are_those_of_a_trace(tmp_path):
    with gzip.open(tmp_path / "trace.csv.gz", "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\nx,20,3\ny,900,50\n")
    lengths = read_lengths(tmp_path / "trace.csv.gz")
    assert lengths == ((20, 3), (900, 50))
    work = jobs(Load(rate=20.0, seconds=5.0, adapters=2, lengths=lengths, vocab=9), 64)
    assert {(len(job.prompt), job.max_tokens) for job in work} == {(20, 3), (32, 32)}
    assert {token for job in work for token in job.prompt} == set(range(4, 9))


@pytest.mark.long
def test_prefilled_prompts_take_one_step_to_their_first_token():
    sizes = {
        "structured_outputs": False,
        "max_model_len": 64,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 8,
        "max_loras": 1,
    }
    with Engine("assets/tiny-moe", {}, enable_prefix_caching=False, **sizes) as engine:
        steps = []
        for _ in range(2):
            before = engine.stats().steps
            engine.generate([[5] * 40], None, Sampling(max_tokens=3, ignore_eos=True))
            settle(engine)
            steps.append(engine.stats().steps - before)
            take_prompts_as_prefilled(engine)
        assert steps == [40 // 8 + 2, 3]
        engine.check_integrity()
    with (
        Engine("assets/tiny-moe", {}, **sizes) as caching,
        pytest.raises(ValueError, match="prefix"),
    ):
        take_prompts_as_prefilled(caching)


def test_adapters_are_dealt_out_by_their_share_of_the_requests():
    options = ablation.parse_args(["--adapters", "20", "--cold", "2", "--zipf", "1.0"])
    home = homes(options, 2)
    assert set(home) == {adapter_name(number) for number in range(22)}
    shares = popularity(20, 1.0)
    assert sum(shares) == pytest.approx(1)
    loads = [sum(shares[n] for n in range(20) if home[adapter_name(n)] == i) for i in (0, 1)]
    assert loads == pytest.approx([0.5, 0.5], abs=0.01)
    assert set(homes(options, 1).values()) == {0}


@pytest.mark.parametrize("said", [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"JAX_PLATFORMS": "cuda"}])
def test_too_few_gpus_are_refused(said, monkeypatch):
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    options = ablation.parse_args(["--splits", "2+2", "3+1"])
    with pytest.raises(ValueError, match=r"2\+2 or 3\+1, need 4 GPUs; [02] are there"):
        require_gpus(options, said)
    require_gpus(options, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    require_gpus(options, {})  # a machine without any, on its CPU


def test_random_adapters_fit_their_model_and_differ(tmp_path):
    config = read_config(Path("assets/tiny-moe"))
    catalogue = model_class(config.model_type).catalogue(config)
    made = make_adapters(tmp_path, 2, rank=3)
    dummies = DummyAdapters(1 << 18)
    first, second = (dummies.read(Path(folder), catalogue) for folder in made.values())
    names = set(catalogue.module_names) - {"router", "lm_head"}
    layers = range(config.num_layers)
    assert set(first.sites) == {(name, layer) for name in names for layer in layers}
    assert first.report.max_rank == 3
    assert first.digest != second.digest


@pytest.mark.slow
def test_a_system_starts_serves_and_ends(tmp_path):
    words = "--model assets/tiny-moe --load-format dummy --rank 4 --prefilled --cold 3"
    words += " --adapters 4 --warm 2 --server-loras 4 --rates 8 --seconds 1"
    options = ablation.parse_args([*words.split(), "--max-model-len", "128", "--max-num-seqs", "8"])
    adapters = ablation.adapters_of(options, tmp_path)
    with contextlib.closing(System(options, "+kernel", *options.splits, adapters)) as system:
        cold, *rows, best = ablation.rows_of(options, system)
    assert cold["cold_ttft"] > 0
    assert [row["failed"] for row in rows] == [0]
    assert rows[0]["requests"] > 2
    assert best["serviceable_rate"] in (0, 8)


def test_every_system_is_measured_with_every_split_but_the_coupled_one():
    words = ["--systems", "coupled", "+kernel", "--splits", "3+1", "2+2:ep1-pp2"]
    found = ablation.systems_of(ablation.parse_args(words))
    staged = Split(2, 2, "ep1-pp2")
    assert found == [("coupled", Split(3, 1)), ("+kernel", Split(3, 1)), ("+kernel", staged)]
    assert str(staged) == words[-1]
    for wrong in ("4", "4+0", "0+1", "a+b", "1+1+1"):
        with pytest.raises(SystemExit):
            ablation.parse_args(["--splits", wrong])


def test_every_switch_is_a_flag_and_one_system_has_none_off():
    for name, switches in STEPS.items():
        made = ClusterConfig(lora_server=1, **switches)
        assert (made == ClusterConfig(lora_server=1)) == (name == "+kernel")


def test_rates_rise_until_one_is_not_served():
    class Slow:
        """A system that takes as long for the first token as there are requests."""

        name, device = "slow", "1 x cpu"

        def serve(self, work, patience):
            first = [job.at + len(work) / 100 for job in work]
            return 0.0, [Told(n, at, at, 1, None) for n, at in enumerate(first)]

    options = ablation.parse_args(["--rates", "40", "1", "5", "80", "--seconds", "2"])
    *rows, last = ablation.rows_of(options, Slow())
    assert [row["rate"] for row in rows] == [1, 5, 40]
    assert last == {"name": "slow", "serviceable_rate": 5}


class Scripted:
    """A system whose answers take what the script says: cold adapters longer, the first time."""

    name = "scripted"

    def __init__(self):
        self.known, self.sizes = {"adapter-0"}, []

    def warm_neighbour(self, adapter):
        return "adapter-0"

    def serve(self, work, patience):
        told = []
        for number, job in enumerate(work):
            cold = 0.0 if job.adapter in self.known else 0.5
            self.known.add(job.adapter)
            first = 50 + job.at + 0.1 + cold + 0.01 * (len(work) > 4)
            each = 0.002 if len(work) in (2, 3) else 0.001
            told.append(
                Told(number, first, first + each * (job.max_tokens - 1), job.max_tokens, None)
            )
        self.sizes.append(len(work))
        return 50.0, told


def test_cold_adapters_are_asked_alone_queued_and_beside_a_hit():
    options = ablation.parse_args(["--adapters", "2", "--cold", "6"])
    system = Scripted()
    row = ablation.cold_row(options, system)
    want = {"cold_ttft": 0.6, "warm_ttft": 0.1, "queued_ttft": 0.61, "queued_warm_ttft": 0.11}
    want |= {"hit_tpot": 0.001, "hit_tpot_beside_loads": 0.002}
    assert row == pytest.approx(want)
    full = options.max_num_seqs + 1
    assert system.sizes == [1] * 4 + [full] * 4 + [1, 3]


@pytest.mark.long
def test_figures_and_plot(tmp_path):
    options = ablation.parse_args(["--slo-ttft", "0.25", "--slo-tpot", "0.11"])
    work = [Job(1.0, "a", [5], 3), Job(2.0, "a", [5], 3), Job(3.0, "b", [5], 3)]
    told = [
        Told(0, 101.2, 101.4, 3, None),
        Told(1, 102.5, 102.7, 3, None),
        Told(2, None, 103.1, 0, "lost"),
    ]
    row = ablation.summary(options, work, 100.0, told)
    assert (row["requests"], row["failed"]) == (3, 1)
    assert row["ttft_p50"] == pytest.approx(0.35)
    assert row["tpot_mean"] == pytest.approx(0.1)
    assert row["slo_attainment"] == pytest.approx(1 / 3)
    assert row["adapters_at_slo"] == 0.0
    rows = [{"name": name, "device": "2 x cpu", "rate": 10.0} | row for name in ("coupled", "+all")]
    rows.append({"name": "coupled", "cold_ttft": 0.2, "warm_ttft": 0.1})
    plot_ablation({"rows": rows, "options": vars(options)}, tmp_path / "plot.png")
    faster = [one | {"rate": 20.0} for one in rows[:2]]
    plot_ablation({"rows": rows + faster, "options": vars(options)}, tmp_path / "lines.png")
    assert all((tmp_path / f"{n}.png").stat().st_size > 1000 for n in ("plot", "lines"))
