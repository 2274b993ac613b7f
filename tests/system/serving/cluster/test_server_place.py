"""LoRA Server derived from a cluster's options; errors say what to change."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import lora_server_cases as cases

from lora_jax.models.loader import read_config
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.provision import provisioning_text, read_request
from serving.cluster import server_place
from serving.cluster.server_place import ServerPlace, server_access, server_spec
from serving.http.settings import HttpSettings
from serving.lora_server.transport.world import World

WITHOUT_HTTP = """
import sys
for name in ("fastapi", "uvicorn", "pydantic", "starlette"):
    sys.modules[name] = None
import bench.ablation.instance, serving.cluster.server_place, serving.lora_server.group
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model, _ = cases.write_files(tmp_path_factory.mktemp("place"), 0)
    return EngineConfig(model=model, **cases.ENGINE)


def test_without_a_server_there_is_no_spec(engine):
    assert server_spec(engine, ClusterConfig(instances=2)) is None


def test_a_spec_follows_from_engine_and_roles(engine):
    spec = server_spec(engine, ClusterConfig(instances=2, lora_server=2))
    assert spec is not None
    assert (spec.placement, spec.ranks, spec.dtype) == ("ep2-pp1", 2, "float32")
    in_8_bits = dataclasses.replace(engine, lora_dtype="int8")
    narrow = server_spec(in_8_bits, ClusterConfig(instances=2, lora_server=2))
    assert narrow == dataclasses.replace(spec, lora_dtype="int8")
    assert (spec.num_adapters, spec.max_rank) == (2 * engine.max_loras, engine.max_lora_rank)
    assert spec.max_rows == engine.max_num_batched_tokens * cases.SHAPE.top_k
    assert spec.host_bytes == engine.max_total_adapter_bytes
    assert (spec.layerwise, spec.implementation, spec.transport) == (True, None, "auto")
    assert not spec.attention
    assert server_spec(engine, ClusterConfig(lora_server=1, lora_attention="remote")).attention
    slow = {"layerwise_loading": False, "lora_kernel": "reference", "lora_server_transport": "nixl"}
    found = server_spec(engine, ClusterConfig(lora_server=2, **slow))
    assert (found.layerwise, found.implementation, found.transport) == (False, "reference", "nixl")
    assert spec.byte_budget is None
    room = ClusterConfig(lora_server=2, lora_server_memory_bytes=1 << 20)
    assert server_spec(engine, room).byte_budget == 1 << 20
    changed = dataclasses.replace(engine, dtype="bfloat16")
    assert server_spec(changed, ClusterConfig(lora_server=1)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_server": 3}, "3 devices cannot share"),
        ({"lora_server": 2, "placement": "ep4-pp1"}, "choose from ep1-pp2, ep2-pp1"),
        ({"lora_server": 2, "placement": "dp2"}, "use epX-ppY"),
        ({"lora_server": 2, "lora_server_adapters": 3}, "raise --lora-server-adapters"),
        ({"lora_server": 2, "lora_server_memory_bytes": 9}, "EP2-PP1, .* more devices or a lower"),
    ],
)
def test_what_is_impossible_says_what_to_change(engine, fields, message):
    with pytest.raises(ValueError, match=message):
        server_spec(engine, ClusterConfig(**fields))


def test_a_server_sized_for_instances_of_two_devices_serves_them(engine):
    """What --provision chooses is what --placement takes beside such instances."""
    times = {"batch": 8, "receive": 9, "send": 9}
    measured = [times | {"ep": x, "lora": lora} for x, lora in ((2, 5), (4, 7))]
    wanted = {
        "adapters": {"count": 8, "zipf": 1, "requests_per_s": 1, "output_tokens": 2},
        "rank": engine.max_lora_rank,
        "dtype": "float32",
        "instances": {"count": 2, "devices": 2},
        "server": {"bytes_per_device": 1e9, "most_devices": 8},
        "slo": {"tpot_s": 0.1, "admission_rate": 0.95},
        "base_us": {"attention": 9, "moe": 9},
        "server_us": measured,
    }
    config = read_config(Path(engine.model))

    def chosen(devices):
        request = read_request(wanted | {"instances": {"count": 2, "devices": devices}})
        text = provisioning_text(request, config)
        return re.search(r"^placement  (EP\d-PP\d) on (\d) devices", text, re.MULTILINE).groups()

    assert chosen(1) == chosen(2) == ("EP2-PP1", "2")
    split = dataclasses.replace(engine, tensor_parallel_size=2)
    cluster = ClusterConfig(instances=2, lora_server=2, placement="ep2-pp1")
    Options(split, HttpSettings(), cluster)
    assert server_spec(split, cluster) == server_spec(engine, cluster)
    assert server_spec(split, dataclasses.replace(cluster, placement=None)).placement == "ep2-pp1"
    with pytest.raises(ValueError, match="4 experts cannot be split evenly over an instance's 3"):
        chosen(3)


def test_a_world_has_instances_of_one_gpu(engine):
    cluster = ClusterConfig(instances=2, lora_server=2, lora_server_transport="nvshmem")
    assert server_spec(engine, cluster).transport == "nvshmem"
    split = dataclasses.replace(engine, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="--tensor-parallel-size 2 gives an instance several"):
        server_spec(split, cluster)


def test_an_instance_joins_its_servers_world_as_its_pe(engine, monkeypatch):
    cluster = ClusterConfig(instances=2, lora_server=2, lora_server_transport="nvshmem")
    spec, asked = server_spec(engine, cluster), []
    monkeypatch.setattr(
        server_place.selection, "open_client_at", lambda *given, **more: asked.append(more)
    )
    world = World(b"id", 2, 2, one_host=True)
    place = ServerPlace(spec, (), cluster, world, 1)
    server_access(place, None, "instance-1 x").connect(None, 0)
    assert asked == [{"separate_stream": False, "device": 0, "world": (world, 3)}]


@pytest.mark.parametrize(("said", "dtype"), [("bfloat16", "bfloat16"), (None, "float32")])
def test_a_model_without_weights_has_the_dtype_of_its_config(engine, tmp_path, said, dtype):
    raw = json.loads(Path(engine.model, "config.json").read_text())
    raw = {k: v for k, v in raw.items() if k not in ("dtype", "torch_dtype")} | {"dtype": said}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v}))
    made_up = dataclasses.replace(engine, model=str(tmp_path), load_format="dummy")
    assert server_spec(made_up, ClusterConfig(lora_server=1)).dtype == dtype
    with pytest.raises(ValueError, match="holds neither"):
        server_spec(dataclasses.replace(made_up, load_format="auto"), ClusterConfig(lora_server=1))


def test_engines_and_ranks_run_where_no_http_server_is_installed():
    subprocess.run([sys.executable, "-c", WITHOUT_HTTP], check=True, timeout=120)
