"""The plan of a deployment: bytes, tiers, hits and cost of a model at hand."""

import dataclasses
import json

import pytest
from support.processes.server_process import ROOT

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from serving import launch
from serving.api.config import EngineConfig
from serving.cli.plan import DeviceSizes, ModelSizes, PlanRequest, plan_text, read_request

LAYERS = tuple(range(80))
SHAPES = {"q_proj": 8192, "k_proj": 1024, "v_proj": 1024, "o_proj": 8192}


@pytest.fixture
def llama_70b():
    modules = {name: LoraModule(name, 8192, wide, LAYERS) for name, wide in SHAPES.items()}
    return LoraCatalogue("llama", 80, modules, ())


KV = 80 * 2 * 8 * 128 * 2  # bytes of a token


def halves(catalogue):
    """What two devices have: inputs whole, outputs and KV heads in halves."""

    def on_each(size):
        assert size == 2
        modules = {
            name: dataclasses.replace(module, d_out=module.d_out // 2)
            for name, module in catalogue.modules.items()
        }
        return DeviceSizes(dataclasses.replace(catalogue, modules=modules), KV // 2)

    return on_each


def test_the_plan_counts_devices_tiers_and_money(llama_70b):
    flags = {"max_loras": 30, "max_lora_rank": 16, "max_total_adapter_bytes": 1 << 36}
    engine = EngineConfig(model="m", **flags)
    sizes, on_each = ModelSizes(141_000_000_000, KV, 2), halves(llama_70b)
    text = plan_text(PlanRequest(device_bytes=141e9), engine, llama_70b, sizes, on_each)
    assert "devices        2 of 141 GB" in text
    # A lies whole on both devices: 80 layers, 30 adapters, rank 16, in 2 bytes.
    held = 80 * 30 * 16 * 2 * (2 * 4 * 8192 + 2 * 8192 + 2 * 1024)
    assert f"adapter slots  {held / 1e9:.3g} GB: 30 adapters" in text
    assert f": {(int(2 * 0.9 * 141e9) - 141_000_000_000 - held) // KV} tokens" in text
    assert "2,920 a month" in text
    assert "host           524 adapters" in text
    assert "the 30 most popular get 53.4%" in text
    assert "rank 256" in text
    small = PlanRequest(adapters=10, zipf=0.0, device_bytes=141e9)
    text = plan_text(small, engine, llama_70b, sizes, on_each)
    assert "device 100.0%, host 0.0%, disk 0.0%" in text


def test_devices_that_are_asked_for_are_those_of_the_plan(llama_70b):
    engine = EngineConfig(model="m", max_loras=4, tensor_parallel_size=2)
    sizes, on_each = ModelSizes(16_000_000_000, KV, 2), halves(llama_70b)
    text = plan_text(PlanRequest(), engine, llama_70b, sizes, on_each)
    assert "devices        2 of 80 GB" in text
    assert "cost           2 GPUs" in text
    few = dataclasses.replace(engine, lora_memory_bytes=1 << 30)  # of each device
    assert "adapter slots  2.15 GB" in plan_text(PlanRequest(), few, llama_70b, sizes, on_each)
    small = PlanRequest(device_bytes=1e9)
    with pytest.raises(ValueError, match=r"2 devices have 1\.8 GB .* raise --tensor-parallel-size"):
        plan_text(small, engine, llama_70b, sizes, on_each)


def test_a_trace_says_what_requests_find(llama_70b, tmp_path):
    (tmp_path / "trace").write_text("a\nb\n" * 50 + "c\na\n" * 50)
    request = read_request(json.dumps({"trace": str(tmp_path / "trace"), "device_bytes": 141e9}))
    assert request.adapters == 3
    engine = EngineConfig(model="m", max_loras=2, max_lora_rank=16)
    text = plan_text(
        request, engine, llama_70b, ModelSizes(141_000_000_000, KV, 2), halves(llama_70b)
    )
    assert "200 of the trace for 3 adapters: device 98.0%, host 0.5%, disk 1.5%" in text
    assert "the 2 most popular get 75.0%" in text


def test_what_cannot_be_served_is_an_error(llama_70b):
    engine = EngineConfig(model="m", max_loras=1, max_lora_rank=1024)
    request, sizes = PlanRequest(device_bytes=1e9), ModelSizes(10**9, 10**5, 2)
    with pytest.raises(ValueError, match="no room for KV"):
        plan_text(request, engine, llama_70b, sizes, halves(llama_70b))


WRONG = [
    ("[]", "object"),
    ('{"adaptors": 3}', "'adaptors'"),
    ('{"adapters": 0}', "adapters"),
    ('{"adapters": 1.5}', "an integer"),
    ('{"adapters": 1e7}', "an integer"),
    ('{"adapters": 2000000}', "1,000,000"),
    ('{"zipf": -1}', "zipf"),
    ('{"zipf": true}', "zipf"),
    ('{"price_per_gpu_hour": "2"}', "price_per_gpu_hour"),
    ('{"modules": "q_proj"}', "modules"),
    ('{"guide": 1}', "guide"),
    ('{"trace": 5}', "trace must be the path"),
    ('{"trace": "/nowhere"}', "trace '/nowhere': No such file"),
    ('{"trace": "x", "adapters": 5}', "leave adapters out"),
    ('{"trace": "x", "zipf": 1.0}', "leave zipf out"),
    ("{", "Expecting"),
]


@pytest.mark.parametrize(("text", "named"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests_name_the_field(text, named):
    with pytest.raises(ValueError, match=named):
        read_request(text)
    assert read_request("{}") == PlanRequest()


def test_the_command_prints_the_plan_of_the_shipped_model(capsys):
    asked = json.dumps({"adapters": 200, "rank": 8, "device_bytes": 1e9, "guide": True})
    model = str(ROOT / "assets" / "tiny-moe")
    assert launch.main([model, "--plan", asked, "--max-loras", "20"]) == 0
    text = capsys.readouterr().out
    assert "20 adapters" in text
    assert "disk           200 adapters" in text
    assert "do not add up" in text
    assert launch.main([model, "--plan", asked, "--tensor-parallel-size", "2"]) == 0
    assert "devices        2 of 1 GB" in capsys.readouterr().out
    assert launch.main([model, "--plan", '{"modules": ["nope"]}']) == 1
