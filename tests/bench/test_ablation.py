"""The ablation's requests are the same for every system, and its figures follow from the times."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.ablation import __main__ as ablation
from bench.ablation.instance import Told
from bench.ablation.workload import Job, Load, jobs, write_adapters
from bench.report import plot_ablation
from serving.cluster.config import ClusterConfig


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


def test_every_switch_is_a_flag_and_the_last_system_has_none_off():
    for name, switches in ablation.STEPS.items():
        made = ClusterConfig(lora_server=1, **switches)
        assert (made == ClusterConfig(lora_server=1)) == (name == "+kernel")


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
    result = {"rows": [{"name": "coupled"} | row], "options": vars(options), "device": "a machine"}
    plot_ablation(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
