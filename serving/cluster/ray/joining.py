"""Joins a running Ray cluster for the roles of one command, and refuses what cannot work there."""

import dataclasses
import importlib.util
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster.ray.groups import groups_of
from serving.runtime.role_host import AbstractRoleHosts

logger = logging.getLogger(__name__)

# Variables of this command that its processes on other hosts get too.
_PASSED_ON = ("JAX_", "XLA_", "LORA_JAX_", "NCCL_", "UCX_", "NVSHMEM_")
_CONNECT_S = 5.0
_ADDRESS, _AUTH = "RAY_ADDRESS", "RAY_AUTH_MODE"


def ray_hosts(
    options: Options, environ: Mapping[str, str] = os.environ
) -> tuple[Options, AbstractRoleHosts]:
    """Return the hosts for all roles, and the options with --nnodes as Ray's hosts need it.

    `check_ray` has found nothing. Raises StartError for a cluster that is not there or too small,
    and for hosts that do not fit this one.
    """
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call after the end joins nothing
    import ray  # here: others have no ray

    _join(ray, environ)
    from serving.cluster.ray.hosts import RayHosts, rooms  # here: they import ray

    cluster, devices = options.cluster, options.engine.tensor_parallel_size
    try:
        sizes = cluster.instances, devices, cluster.nnodes, cluster.lora_server
        groups = groups_of(*sizes, rooms())
        hosts = groups[0].hosts
        if hosts > 1 and cluster.lora_server:
            raise ValueError(
                f"--lora-server serves instances of one host each, and --tensor-parallel-size "
                f"{devices} needs {hosts}: choose a smaller one."
            )
        options = dataclasses.replace(options, cluster=dataclasses.replace(cluster, nnodes=hosts))
        passed = {name: text for name, text in environ.items() if name.startswith(_PASSED_ON)}
        needs_tokens = not options.insecure
        config: EngineConfig = options.engine
        return options, RayHosts(groups, config, passed, needs_tokens=needs_tokens)
    except (ValueError, ConnectionError, OSError) as error:
        ray.shutdown()
        raise StartError(f"Cannot serve on Ray's hosts: {error}") from error


def check_ray(options: Options, environ: Mapping[str, str] = os.environ) -> None:
    """Raise StartError for what is known before ray is imported.

    These are the package, the tokens, and a cluster at whose address nobody listens.
    """
    if importlib.util.find_spec("ray") is None:
        raise StartError(
            "--distributed-executor-backend ray needs the package ray: pip install "
            "'lora-jax[cluster]' on every host, or leave the flag out."
        )
    _require_tokens(options, environ)
    address = environ.get(_ADDRESS, "auto")
    try:
        _require_listener(address)
    except OSError as error:
        raise _not_there(address, error) from error


def _require_tokens(options: Options, environ: Mapping[str, str]) -> None:
    """Raise StartError unless Ray asks for a token, or the user wants it to be open."""
    if environ.get(_AUTH, "") == "token":
        return
    if options.insecure:
        logger.warning(
            "Ray requires no token: anybody who reaches its ports can run code on its hosts."
        )
        return
    raise StartError(
        f"Whoever reaches a Ray cluster without tokens runs code on its hosts: set {_AUTH}=token "
        "and RAY_AUTH_TOKEN_PATH=FILE (ray get-auth-token --generate makes one) on every host "
        "before ray start, and for this command. --insecure takes a cluster without."
    )


def _join(ray: Any, environ: Mapping[str, str]) -> None:
    """Connect this process. Raises StartError where there is no cluster, or the token is wrong."""
    address = environ.get(_ADDRESS, "auto")
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _not_there(address, error) from error


def _not_there(address: str, error: Exception) -> StartError:
    text = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
    return StartError(
        f"Cannot join the Ray cluster at {address}: {text}. Start it "
        "(ray start --head, and ray start --address=HEAD:6379 on the others), set "
        f"{_ADDRESS}=HEAD:6379, and give this command the cluster's token."
    )


def _require_listener(address: str) -> None:
    """Raise OSError where nobody listens: Ray would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _CONNECT_S).close()
