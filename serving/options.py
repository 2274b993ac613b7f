"""Everything the command line says, for whichever process acts on it. No jax."""

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any

from serving.cluster.config import ClusterConfig
from serving.config import EngineConfig
from serving.flags import LoraModule
from serving.http.settings import HttpSettings


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything the command line says."""

    engine: EngineConfig
    http: HttpSettings
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    adapters: tuple[LoraModule, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    log_level: str = "info"
    access_log: bool = True
    metrics_port: int | None = None  # /metrics without a key
    metrics_host: str = "127.0.0.1"
    plan: str | None = None  # a workload file: print the plan for it instead of serving
    uvicorn: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [module.name for module in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"--lora-modules has the name {twice!r} twice.")
        if self.metrics_port is not None and not self.cluster.is_single:
            raise ValueError(
                "--metrics-port is for one instance; give Prometheus a --metrics-key, with which "
                "/metrics of several instances answers."
            )
        if not (self.insecure or self.http.has_api_keys or is_loopback(self.host)):
            raise ValueError(
                f"Without --api-key or --keys-file everybody who can reach {self.host} could use "
                "this server. Give a key, or say --insecure if that is what you want."
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
