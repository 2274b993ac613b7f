"""Roles of the command by its flags: a node, a front of functions, a cluster; and its GPUs."""

import importlib
from types import SimpleNamespace

import pytest

from serving import launch
from serving.launch import StartError, read_options


def test_the_command_is_a_node_a_front_of_functions_or_a_cluster_as_its_flags_say(
    monkeypatch, tmp_path
):
    ran, closed = [], []
    for module, name in (
        ("nodes.agent", "serve_agent"),
        ("functions_front", "serve_functions"),
        ("front", "serve_cluster"),
    ):
        told = lambda options, *given, name=name: ran.append((name, *given))  # noqa: E731
        monkeypatch.setattr(importlib.import_module(f"serving.cluster.{module}"), name, told)
    met = SimpleNamespace(close=lambda: closed.append("nodes"))
    hosts = importlib.import_module("serving.cluster.nodes.hosts")
    monkeypatch.setattr(hosts, "meet_nodes", lambda options: met)
    (tmp_path / "secret").write_text("s" * 32)
    nodes = ["--nnodes", "2", "--nodes-secret-file", str(tmp_path / "secret")]
    node = ["m", *nodes, "--node-rank", "1", "--tensor-parallel-size", "2"]
    launch.run(read_options(node, {}))
    assert ran == [("serve_agent",)]  # which listens nowhere
    several = ["--instances", "2"]
    for flags in (["--functions", str(tmp_path)], several, [*several, *nodes]):
        launch.run(read_options(["m", "--port", "0", *flags], {}))
    assert [name for name, *_ in ran[1:]] == ["serve_functions", "serve_cluster", "serve_cluster"]
    assert [given[1].fileno() for given in ran[1:]] == [-1, -1, -1]  # closed behind them
    assert [given[2:] for given in ran[1:]] == [(), (None,), (met,)]
    assert closed == ["nodes"]


def test_a_list_of_gpus_too_short_for_the_roles_is_refused_before_they_start(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    given = ["m", "--port", "0", "--instances", "2", "--lora-server", "2"]
    with pytest.raises(StartError, match=r"needs GPUs 0 to 3, but .*=0,1,2 lists 3: list one for"):
        launch.run(read_options(given, {}))
    wide = ["m", "--port", "0", "--instances", "2", "--tensor-parallel-size", "2"]
    with pytest.raises(StartError, match=r"needs GPUs 0 to 3, but .*=0,1,2 lists 3"):
        launch.run(read_options(wide, {}))


def test_an_instance_whose_adapters_have_a_gpu_of_their_own_is_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    given = ["m", "--port", "0", "--functions", str(tmp_path), "--instances", "2"]
    with pytest.raises(StartError, match=r"takes two GPUs .* leave --instances 2 out"):
        launch.run(read_options([*given, "--functions-isolation", "server"], {}))


def test_each_node_needs_gpus_for_its_own_processes(monkeypatch, tmp_path):
    """A process without one would compute on the CPU."""
    ran = []
    agent = importlib.import_module("serving.cluster.nodes.agent")
    monkeypatch.setattr(agent, "serve_agent", ran.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    (tmp_path / "secret").write_text("s" * 32)
    nodes = ["m", "--port", "0", "--nnodes", "2", "--nodes-secret-file", str(tmp_path / "secret")]
    spread = [*nodes, "--instances", "3", "--tensor-parallel-size", "2"]  # two of them on node 0
    with pytest.raises(
        StartError, match=r"processes of node 0: .* needs GPUs 0 to 3, but .* lists"
    ):
        launch.run(read_options(spread, {}))
    launch.run(read_options([*spread, "--node-rank", "1"], {}))
    assert len(ran) == 1
    split = [*nodes, "--tensor-parallel-size", "8", "--node-rank", "1"]
    with pytest.raises(
        StartError, match=r"processes of node 1: .* needs GPUs 0 to 3, but .* lists"
    ):
        launch.run(read_options(split, {}))
