"""Roles that contradict each other are refused in the words of the flags."""

import pytest

from serving.api.cluster_config import ClusterConfig

RAY = {"distributed_executor_backend": "ray"}


def test_by_default_one_process_does_it_all():
    assert ClusterConfig().is_single
    assert not ClusterConfig(instances=2).is_single
    assert not ClusterConfig(lora_server=1).is_single
    assert not ClusterConfig(nnodes=2, nodes_secret_file="s").is_single
    over_ray = ClusterConfig(distributed_executor_backend="ray", nnodes=2, instances=2)
    assert over_ray.uses_ray
    assert not over_ray.spreads_roles
    spread = ClusterConfig(nnodes=2, lora_server=1, nodes_secret_file="s")
    assert spread.spreads_roles
    assert not spread.is_single
    assert not ClusterConfig(nnodes=2, nodes_secret_file="s").spreads_roles  # one is split
    assert not ClusterConfig(instances=2).spreads_roles
    assert not over_ray.is_single
    assert not ClusterConfig(distributed_executor_backend="uni").uses_ray


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"instances": 0}, r"instances must be in \[1, 64\], got 0"),
        ({"lora_server": -1}, "lora_server must be in"),
        ({"lora_server": 1, "lora_server_wait_s": 0}, "lora_server_wait_s must be in"),
        ({"lora_server": 1, "lora_server_adapters": 0}, "lora_server_adapters must be in"),
        ({"lora_server": 1, "local_expert_slots": -1}, "local_expert_slots must be in"),
        ({"lora_server": 1, "lora_kernel": "quick"}, "lora_kernel must be one of fast, reference"),
        ({"lora_server": 1, "lora_attention": "far"}, "lora_attention must be one of local, rem"),
        ({"lora_attention": "remote"}, "add --lora-server"),
        (
            {"lora_server": 1, "lora_server_transport": "ucx"},
            "one of auto, tcp, nixl, nvshmem, got 'ucx'",
        ),
        (
            {"lora_server_transport": "nvshmem"},
            "nvshmem carries rows to a LoRA Server; add --lora-server",
        ),
        (
            {
                "lora_server": 1,
                "lora_server_transport": "nvshmem",
                "lora_separate_stream": True,
            },
            "--lora-separate-stream is for GPUs of one host",
        ),
        (
            {"lora_server": 1, "lora_server_transport": "tcp", "lora_separate_stream": True},
            "--lora-separate-stream is for GPUs of one host",
        ),
        (
            RAY | {"lora_server": 1, "lora_separate_stream": True},
            "--lora-separate-stream is for GPUs of one host",
        ),
        (
            {"nnodes": 2, "nodes_secret_file": "s", "lora_server": 1, "lora_separate_stream": True},
            "--lora-separate-stream is for GPUs of one host",
        ),
        (
            {"lora_server": 1, "lora_server_transport": "nvshmem", "local_expert_slots": 1},
            "nvshmem they restart with it",
        ),
        ({"local_expert_slots": 2}, "add --lora-server"),
        ({"placement": "ep2-pp1"}, "add --lora-server"),
        ({"nnodes": 0}, r"nnodes must be in \[1, 64\], got 0"),
        ({"node_rank": 1}, r"node_rank must be in \[0, 0\] with --nnodes 1, got 1: --nnodes is"),
        ({"headless": True}, "--headless is for hosts without a front"),
        ({"nnodes": 2, "nodes_secret_file": "s", "headless": True}, "--node-rank is above 0"),
        ({"master_port": 0}, r"master_port must be in \[1, 65535\], got 0"),
        ({"nnodes": 2}, "--nnodes 2 needs --nodes-secret-file"),
        ({"nnodes": 2, "instances": 2}, "--nnodes 2 needs --nodes-secret-file"),
        (
            {"nnodes": 4, "instances": 2, "lora_server": 1, "nodes_secret_file": "s"},
            "--nnodes 4 has more hosts than --instances 2 and --lora-server 1 have processes",
        ),
        ({"distributed_executor_backend": "slurm"}, "must be one of mp, ray, uni, got 'slurm'"),
        (RAY | {"nnodes": 2, "node_rank": 1}, "leave --node-rank out"),
        (RAY | {"node_rank": 1, "headless": True}, "leave --node-rank, --headless out"),
        (
            {"nnodes": 2, "master_addr": "0.0.0.0", "nodes_secret_file": "s"},
            r"--master-addr 0\.0\.0\.0 is no address that other nodes can connect to",
        ),
        (
            {"nnodes": 2, "master_addr": "fd00::1", "nodes_secret_file": "s"},
            "--master-addr fd00::1 has a colon: nodes meet over IPv4",
        ),
        (
            {"nnodes": 2, "master_addr": "10.0.0.1:29501", "nodes_secret_file": "s"},
            "the port is --master-port's",
        ),
        (RAY | {"master_port": 7, "master_addr": "h"}, "leave --master-addr, --master-port out"),
        (RAY | {"nodes_secret_file": "s"}, "leave --nodes-secret-file out"),
        (RAY | {"nnodes": 2, "lora_server": 1}, "leave --nnodes 2 out"),
        ({"lora_server_adapters": 4}, "add --lora-server"),
        ({"lora_server_memory_bytes": 4}, "add --lora-server"),
        ({"lora_server": 1, "lora_server_memory_bytes": 0}, "lora_server_memory_bytes must be"),
    ],
)
def test_contradictions(fields, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**fields)
