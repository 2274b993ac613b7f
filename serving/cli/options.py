"""Options parsed from the command line, for every process. No jax."""

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any

from lora_jax.adapters.versions import check_name, is_of
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.flag_values import LoraModuleFlag
from serving.http.settings import HttpSettings


@dataclasses.dataclass(frozen=True)
class Options:
    """Parsed options of the command line."""

    engine: EngineConfig
    http: HttpSettings
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    functions: FunctionsConfig = dataclasses.field(default_factory=FunctionsConfig)
    adapters: tuple[LoraModuleFlag, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket instead of host and port
    insecure: bool = False
    log_level: str = "info"
    access_log: bool = True
    state_dir: str | None = None  # where loads at run time are recorded
    state_lasts: bool = True  # False: the folder goes with the server
    max_connections: int = 1000
    shutdown_timeout: float = 25.0  # seconds from SIGTERM to the end of the process
    quiet_paths: tuple[str, ...] = ()  # without lines in the access log, beside probes
    log_stats: bool = True
    metrics_port: int | None = None  # /metrics without a key
    metrics_host: str = "127.0.0.1"
    quantization: str | None = None  # the format that config.json has to name
    plan: str | None = None  # JSON: print what a deployment needs and end
    provision: str | None = None  # a workload file: print the LoRA Server it needs and end
    uvicorn: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [module.name for module in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"--lora-modules has the name {twice!r} twice.")
        for name in names:  # before the model is loaded
            check_name(name)
            if is_of(name, self._base_names):
                raise ValueError(
                    f"--lora-modules: {name!r} is the name of the base model, or a version of it."
                )
        if not 1 <= self.max_connections <= 1_000_000:
            raise ValueError(f"--max-connections must be 1 to 1000000, got {self.max_connections}.")
        if not 0 <= self.shutdown_timeout <= 3600:
            raise ValueError(
                f"--shutdown-timeout must be 0 to 3600 seconds, got {self.shutdown_timeout:g}."
            )
        if self.cluster.lora_server and self.engine.speculation is not None:
            raise ValueError(
                "--lora-server serves instances that draw one token at a time: leave "
                "--speculative-config out, or keep the adapters on the instances."
            )
        self._check_server_devices()
        nodes, size = self.cluster.nnodes, self.engine.tensor_parallel_size
        if size % nodes and not self.cluster.spreads_roles:
            raise ValueError(
                f"--tensor-parallel-size {size} must be a multiple of --nnodes {nodes}: each node "
                "has an equal part of the devices."
            )
        self._check_merged()
        self._check_functions()
        if self.metrics_port is not None and not self.cluster.is_single:
            raise ValueError(
                "--metrics-port is for one instance; give Prometheus a --metrics-key, with which "
                "/metrics of several instances answers."
            )
        closed = self.uds is not None or is_loopback(self.host) or self.cluster.follows
        if not (self.insecure or self.http.has_api_keys or closed):
            raise ValueError(
                f"Without --api-key or --keys-file anybody who can reach {self.host} could use "
                "this server. Set a key, or add --insecure to allow that."
            )

    @property
    def _base_names(self) -> tuple[str, ...]:
        return self.http.served_names or (self.engine.model_name,)

    def _check_merged(self) -> None:
        """Raise ValueError for what --merge-adapter does not go with."""
        name = self.engine.merge_adapter
        if name is None:
            return
        flag, engine = f"--merge-adapter {name}", self.engine
        if name not in [module.name for module in self.adapters]:
            raise ValueError(f"{flag} must be a name of --lora-modules.")
        reasons = {
            "it has an instance of its own, which serves nothing else: add --instances 2 or more": (
                self.cluster.instances < 2
            ),
            "it is for instances of one device each: leave --tensor-parallel-size "
            f"{engine.tensor_parallel_size} out": engine.tensor_parallel_size > 1,
            "it is merged on an instance: leave --lora-server out": self.cluster.lora_server > 0,
            "it cannot be replaced or unloaded while the server runs: leave --enable-runtime-lora "
            "out": self.http.enable_runtime_lora,
        }
        if wrong := [reason for reason, is_so in reasons.items() if is_so]:
            raise ValueError(f"{flag}: {'; '.join(wrong)}.")

    def _check_server_devices(self) -> None:
        """Raise ValueError for what a LoRA Server does not go with beside several devices."""
        cluster, engine = self.cluster, self.engine
        if not cluster.lora_server or engine.tensor_parallel_size == 1:
            return
        others = {
            "--no-enable-expert-parallel": engine.enable_expert_parallel is False,
            "--lora-attention remote": cluster.lora_attention == "remote",
            "--local-expert-slots": cluster.local_expert_slots > 0,
        }
        if given := [flag for flag, is_given in others.items() if is_given]:
            raise ValueError(
                f"--lora-server beside --tensor-parallel-size {engine.tensor_parallel_size} serves "
                f"the experts that each device has whole, without {', '.join(given)}: leave that "
                "out, or keep the adapters on the instances."
            )

    def _check_functions(self) -> None:
        """Raise ValueError for what --functions does not go with."""
        if self.functions.functions is None:
            return
        engine = self.engine
        others = {
            "--lora-modules": bool(self.adapters),
            "--lora-dir": engine.lora_dir is not None,
            "--enable-runtime-lora": self.http.enable_runtime_lora,
            "--state-dir": self.state_dir is not None and self.cluster.is_single,
            "--demo": self.http.demo,
            "--metrics-port": self.metrics_port is not None,
            "--lora-server or --nnodes": bool(self.cluster.lora_server) or self.cluster.nnodes > 1,
            "--tensor-parallel-size": engine.tensor_parallel_size > 1,
            "--lora-merge": engine.lora_merge != "off",
            "--max-esft-adapters": bool(engine.max_esft_adapters),
            "--load-format dummy": engine.load_format == "dummy",
        }
        if given := [flag for flag, is_given in others.items() if is_given]:
            raise ValueError(
                f"--functions does not work with {', '.join(given)}: a function is a folder below "
                "it, one LoRA adapter in a process of its own on one device. Leave them out."
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
