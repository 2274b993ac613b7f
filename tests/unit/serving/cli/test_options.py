"""Options that must not be combined."""

import dataclasses

import pytest

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.flag_values import LoraModuleFlag
from serving.cli.options import Options, is_loopback
from serving.http.settings import HttpSettings

ENGINE, OPEN = EngineConfig(model="m"), HttpSettings()


def test_a_network_address_needs_a_key_or_a_word():
    with pytest.raises(ValueError, match="--insecure"):
        Options(ENGINE, OPEN, host="0.0.0.0")
    Options(ENGINE, OPEN, host="0.0.0.0", insecure=True)
    Options(ENGINE, HttpSettings(api_keys=("k",)), host="0.0.0.0")


def test_a_lora_server_serves_instances_that_do_not_speculate():
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    speculating = EngineConfig(model="m", speculative_config=ngram)
    with pytest.raises(ValueError, match="leave --speculative-config out"):
        Options(speculating, OPEN, cluster=ClusterConfig(lora_server=1))


@pytest.mark.parametrize(
    ("fields", "more", "flag"),
    [
        ({"enable_expert_parallel": False}, {}, "--no-enable-expert-parallel"),
        ({}, {"lora_attention": "remote"}, "--lora-attention remote"),
        ({}, {"local_expert_slots": 2}, "--local-expert-slots"),
    ],
)
def test_beside_several_devices_a_lora_server_holds_whole_experts(fields, more, flag):
    split = EngineConfig(model="m", tensor_parallel_size=2)
    Options(split, OPEN, cluster=ClusterConfig(lora_server=1, instances=2))
    other = EngineConfig(model="m", tensor_parallel_size=2, **fields)
    with pytest.raises(ValueError, match=f"--tensor-parallel-size 2 serves .* without {flag}"):
        Options(other, OPEN, cluster=ClusterConfig(lora_server=1, **more))


def test_an_adapter_has_one_name():
    twice = (LoraModuleFlag("a", "x"), LoraModuleFlag("a", "y"))
    with pytest.raises(ValueError, match="'a' twice"):
        Options(ENGINE, OPEN, adapters=twice)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my law", "adapter name 'my law' is not 1 to 64 letters"),
        ("m", "'m' is the name of the base"),
        ("m@v2", "'m@v2' is the name of the base"),
    ],
)
def test_a_name_that_no_adapter_may_have_is_found_before_the_load(name, message):
    with pytest.raises(ValueError, match=message):
        Options(ENGINE, OPEN, adapters=(LoraModuleFlag(name, "x"),))
    served = HttpSettings(served_names=("base",))
    Options(ENGINE, served, adapters=(LoraModuleFlag("m", "x"),))


def test_by_default_one_process_does_it_all():
    assert Options(ENGINE, OPEN).cluster.is_single


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org"])
def test_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_connections": 0}, "--max-connections must be 1 to 1000000, got 0"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout must be 0 to 3600 seconds, got -1"),
    ],
)
def test_bounds(fields, message):
    with pytest.raises(ValueError, match=message):
        Options(ENGINE, OPEN, **fields)


@pytest.mark.parametrize(
    ("name", "cluster", "http", "message"),
    [
        ("a", ClusterConfig(), OPEN, "add --instances 2"),
        ("b", ClusterConfig(instances=2), OPEN, "must be a name of --lora-modules"),
        ("a", ClusterConfig(instances=2, lora_server=1), OPEN, "leave --lora-server out"),
        (
            "a",
            ClusterConfig(instances=2),
            HttpSettings(enable_runtime_lora=True),
            "leave --enable-runtime-lora out",
        ),
    ],
    ids=["alone", "unknown", "server", "runtime"],
)
def test_what_a_merged_adapter_does_not_go_with(name, cluster, http, message):
    engine = EngineConfig(model="m", merge_adapter=name)
    adapters = (LoraModuleFlag("a", "x"),)
    with pytest.raises(ValueError, match=f"--merge-adapter {name}.*{message}"):
        Options(engine, http, cluster=cluster, adapters=adapters)
    good = EngineConfig(model="m", merge_adapter="a")
    wide = dataclasses.replace(good, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"--instances 2 or more; .* --tensor-parallel-size 2 out"):
        Options(wide, OPEN, adapters=adapters)  # all at once
    Options(good, OPEN, cluster=ClusterConfig(instances=2), adapters=adapters)


def test_what_several_roles_do_not_go_with():
    adapters = (LoraModuleFlag("a", "x"),)
    two = ClusterConfig(instances=2)
    with pytest.raises(ValueError, match="--metrics-port is for one instance; give Prometheus"):
        Options(ENGINE, OPEN, cluster=two, adapters=adapters, metrics_port=9)
    Options(ENGINE, OPEN, adapters=adapters, metrics_port=9)
    odd = EngineConfig(model="m", tensor_parallel_size=3)
    nodes = ClusterConfig(nnodes=2, node_rank=1, nodes_secret_file="f")
    with pytest.raises(ValueError, match="3 must be a multiple of --nnodes 2"):
        Options(odd, OPEN, cluster=nodes)
    Options(odd, OPEN, cluster=dataclasses.replace(nodes, instances=2))  # each on one host


def test_what_functions_do_not_go_with_is_named():
    functions = FunctionsConfig(functions="folder")
    Options(ENGINE, OPEN, functions=functions)
    wide = EngineConfig(model="m", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="--functions does not work with --tensor-parallel-size:"):
        Options(wide, OPEN, functions=functions)
    both = HttpSettings(enable_runtime_lora=True, demo=True)
    with pytest.raises(ValueError, match="not work with --enable-runtime-lora, --demo: a function"):
        Options(ENGINE, both, functions=functions)
