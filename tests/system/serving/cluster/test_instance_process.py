"""A process that cannot be an instance says so and leaves; one that can is in test_front.py."""

import os

import pytest
from support.processes.server_process import free_port

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cluster.instance_process import InstanceProcess
from serving.cluster.server_place import ServerPlace
from serving.http.settings import HttpSettings
from serving.lora_server.spec import ServerSpec
from serving.lora_server.transport.selection import RankPlace
from serving.runtime.role_host import ThisHost


class Near(ThisHost):
    """This machine as one of several hosts."""

    address, has_own_gpus = "127.0.0.1", True

    def free_port(self):
        return free_port()


def test_an_instance_over_hosts_ends_as_a_whole(tmp_path):
    """A follower that cannot start is told of at once, not when rank 0 has waited for it."""
    (tmp_path / "model").mkdir()
    engine = EngineConfig(model=str(tmp_path / "model"), tensor_parallel_size=2)
    cluster = ClusterConfig(distributed_executor_backend="ray", nnodes=2)
    options = Options(engine, HttpSettings(), cluster)
    hosts = Near(), Near()
    process = InstanceProcess(options, 0, "", None, lambda *_: None, hosts)
    assert (process.path.host, process.path.port) == ("127.0.0.1", 0)
    (follower,) = process._followers
    with pytest.raises(ConnectionError, match="Instance 0 did not start"):
        process.wait_ready()
    process.kill()
    process.stop()
    for pid in (process.pid, follower.pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.long
def test_an_instance_that_cannot_start_is_told_of(tmp_path, capfd):
    (tmp_path / "model").mkdir()
    model, told = str(tmp_path / "model"), []
    spec = ServerSpec(model, "float32", "ep1-pp1", 1, 1, 1, 8)
    process = InstanceProcess(
        Options(EngineConfig(model=model), HttpSettings()),
        3,
        str(tmp_path / "socket"),
        ServerPlace(spec, (RankPlace(str(tmp_path / "rank")),), ClusterConfig()),
        lambda name, connection: told.append((name, connection)),
    )
    ((name, connection),) = told
    assert name.startswith("instance-3 ")
    with pytest.raises(ConnectionError, match="Instance 3 did not start"):
        process.wait_ready()
    assert not process.is_ready
    process.stop()
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    connection.close()
    assert "holds no config.json" in capfd.readouterr().out
