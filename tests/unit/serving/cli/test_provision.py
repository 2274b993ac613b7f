"""Printed provisioning of a workload file; every wrong field is named."""

import json

import pytest
from support.processes.server_process import ROOT

from lora_jax.config import from_hf
from lora_jax.placement.provision import admission_curve, of_rates
from serving import launch
from serving.cli.provision import provisioning_of_files, provisioning_text, read_request

TINY = ROOT / "assets" / "tiny-moe"  # 4 layers, 8 experts, hidden 128, experts 96 wide
UNIT = 3 * 4 * (128 + 96) * 2
ADAPTER = UNIT * 4 * 8


def workload(**changes) -> dict:
    """20 adapters of rank 4, 12 requests in flight, five adapters to a device."""
    return {
        "adapters": {"count": 20, "zipf": 1.2, "requests_per_s": 6, "output_tokens": 20},
        "rank": 4,
        "dtype": "bfloat16",
        "instances": {"count": 2, "devices": 2},
        "server": {"bytes_per_device": 5 * ADAPTER, "most_devices": 8},
        "slo": {"tpot_s": 0.1, "admission_rate": 0.95},
        "base_us": {"attention": 5000, "moe": 6000},
        "server_us": [
            {"ep": ep, "batch": 64, "receive": 900 // ep, "lora": 800 // ep, "send": 1000 // ep}
            for ep in (1, 2, 4)
        ],
        **changes,
    }


def provisioning(content: dict) -> list[str]:
    config = from_hf(json.loads((TINY / "config.json").read_text()))
    return provisioning_text(read_request(content), config).splitlines()


def test_the_lines_say_what_the_parts_compute():
    weights = [rank**-1.2 for rank in range(1, 21)]
    rates = [6 * weight / sum(weights) for weight in weights]
    curve = admission_curve(of_rates(rates, [2.0] * 20))
    capacity = next(m for m in range(1, 21) if curve[m - 1] >= 0.95)
    assert 5 < capacity <= 10  # two devices
    assert provisioning(workload())[1:5] == [
        f"capacity   {capacity} adapters at a time admit {curve[capacity - 1]:.2%} of the requests "
        "at once (asked: 95.00%)",
        f"devices    2 for the LoRA Server, {capacity * ADAPTER / 2 / 1000:.3g} kB of "
        f"{5 * ADAPTER / 1000:.3g} kB each; room for 10 adapters, predicted immediate-admission "
        f"rate {curve[9]:.2%}",
        "latency    1350 us of 20000 us per layer (Eq. 5)",
        "throughput 1000 us of 25000 us per layer for 2 instances (Eq. 6)",
    ]


def test_the_picture_is_in_it():
    lines = provisioning(workload())
    assert lines[5].startswith("placement  EP2-PP1 on 2 devices")
    assert "experts 0-3" in lines[6]
    assert "layers 0-3" in lines[7]
    assert "device 1" in lines[7]


def test_adapters_go_to_instances_by_their_load():
    adapters = [
        {"name": name, "requests_per_s": rate, "output_tokens": 10}
        for name, rate in (("a", 5), ("b", 3), ("c", 2), ("d", 0))
    ]
    assert provisioning(workload(adapters=adapters))[0] == (
        "workload   4 adapters, 10 requests/s, 10 in flight on 2 instances, 5 to 5 each"
    )


def test_slots_follow_the_time_in_flight_and_not_the_arrivals_alone():
    """Three long and three short ones need fewer slots than six of the mean length."""

    def lines(*output_tokens: float) -> list[str]:
        adapters = [
            {"name": str(i), "requests_per_s": 1, "output_tokens": tokens}
            for i, tokens in enumerate(output_tokens)
        ]
        return provisioning(workload(adapters=adapters, instances={"count": 1, "devices": 1}))

    uneven, even = lines(200, 200, 200, 1, 1, 1), lines(*[100.5] * 6)
    assert uneven[0] == even[0]
    assert (uneven[1].split()[1], even[1].split()[1]) == ("5", "6")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 0}, r"rank must be a whole number in \[1, 100000\], not 0"),
        ({"rank": True}, "rank must be a whole number"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16"),
        ({"extra": 1}, "missing: none; unknown: extra"),
        ({"slo": {"tpot_s": 0.1}}, "slo must have exactly tpot_s, admission_rate; missing: adm"),
        ({"slo": {"tpot_s": 0.1, "admission_rate": 95}}, "at most 1, not 95"),
        ({"slo": {"tpot_s": 0, "admission_rate": 0.9}}, "tpot_s must be a number above 0"),
        ({"slo": [1]}, "slo must be an object"),
        ({"adapters": []}, "adapters must have names of their own"),
        ({"adapters": "a"}, "adapters must be a list"),
        (
            {"adapters": [{"name": "a", "requests_per_s": -1, "output_tokens": 1}]},
            "requests_per_s must be a number from 0 on, not -1",
        ),
        (
            {"adapters": [{"name": "a", "requests_per_s": 1, "output_tokens": 1}] * 2},
            "names of their own; 1 of 2",
        ),
        (
            {"adapters": [{"name": "a", "requests_per_s": 0, "output_tokens": 1}]},
            "above 0 for some adapter",
        ),
        ({"server_us": []}, "at least one measurement"),
        ({"server_us": [{"ep": 1}]}, "an entry of server_us must have exactly"),
        ({"base_us": {"attention": 20000, "moe": 6000}}, "base model alone needs 26000 us"),
        ({"instances": {"count": 2, "devices": 3}}, "8 experts cannot be split evenly"),
        ({"server": {"bytes_per_device": 1, "most_devices": 8}}, "at most 8 devices"),
        (
            {"adapters": {"count": 9, "zipf": 1, "requests_per_s": 99, "output_tokens": 99}},
            "above the largest measured one of ep=1, 64",
        ),
    ],
)
def test_what_is_wrong_is_named(changes, says):
    with pytest.raises(ValueError, match=says):
        provisioning(workload(**changes))


def test_a_model_without_experts_is_refused():
    dense = from_hf(json.loads((ROOT / "assets" / "stories260k" / "config.json").read_text()))
    with pytest.raises(ValueError, match="mixture-of-experts"):
        provisioning_text(read_request(workload()), dense)


def test_the_example_in_docs_is_provisioned():
    text = provisioning_of_files(str(TINY), str(ROOT / "docs" / "lora_server_workload.json"))
    assert "512 adapters, 35 requests/s, 805 in flight" in text


def test_files_are_named_in_errors(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json: Expecting"):
        provisioning_of_files(str(TINY), str(broken))


def test_the_command_prints_the_provisioning(tmp_path, capsys):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(workload()))
    assert launch.main([str(TINY), "--provision", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == provisioning(workload())


def test_the_command_says_why_it_cannot_provision(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(launch.logs, "configure", lambda *_: None)
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(workload(rank=0)))
    assert launch.main([str(TINY), "--provision", str(path)]) == 1
    assert "Cannot size the LoRA Server" in caplog.text
    assert "rank must be" in caplog.text
