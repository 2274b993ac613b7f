"""Configuration of a system of several processes. No jax."""

import dataclasses

LORA_KERNELS = ("fast", "reference")
TRANSPORTS = ("auto", "tcp", "nixl", "nvshmem")  # serving.lora_server.transport.selection
BACKENDS = ("mp", "ray", "uni")  # uni is mp, as far as this server is concerned
PLACES = ("local", "remote")


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Roles of one host or several; a contradiction is a ValueError naming the flags."""

    instances: int = 1  # LLM instances
    lora_server: int = 0  # ranks of the LoRA Server; 0: every instance has its own adapters
    placement: str | None = None  # of the LoRA Server; None: experts over all of its ranks
    lora_server_adapters: int | None = None  # held at a time; None: max_loras of each instance
    lora_server_memory_bytes: int | None = None  # of each rank for them; None: as many as they take
    lora_server_wait_s: float = 0.5  # bound of one exchange of a layer
    lora_server_transport: str = "auto"  # of the rows: by the device; over TCP between hosts
    lora_attention: str = "local"  # where adapters' attention is: "remote", on the LoRA Server too
    local_expert_slots: int = 0  # adapters that an instance takes over while the server is lost
    distributed_executor_backend: str = "mp"  # what starts processes: this command, or Ray
    nnodes: int = 1  # hosts of one instance, with equal parts of its devices, or of all roles
    node_rank: int = 0  # of this host; 0 answers requests
    master_addr: str = "127.0.0.1"  # of rank 0, for the other nodes
    master_port: int = 29501
    nodes_secret_file: str | None = None  # the same secret on all nodes
    headless: bool = False  # no front here, as on every node but rank 0
    # For measuring what each of them brings (InfiniLoRA, section 6.4):
    lora_overlap: bool = True  # exchanges behind the base's computation
    lora_separate_stream: bool = False  # rows do not leave in the step's stream
    layerwise_loading: bool = True  # a cold adapter serves from its first layer on
    lora_prefetch: bool = True  # an adapter is asked for when its request is queued
    lora_kernel: str = "fast"  # of the LoRA Server; "reference": plain JAX

    def __post_init__(self) -> None:
        for name, low, high in (("instances", 1, 64), ("lora_server", 0, 64)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {value}.")
        if not 0 < self.lora_server_wait_s <= 60:
            raise ValueError(
                f"lora_server_wait_s must be in (0, 60], got {self.lora_server_wait_s}."
            )
        adapters = self.lora_server_adapters
        if adapters is not None and not 1 <= adapters <= 65536:
            raise ValueError(f"lora_server_adapters must be in [1, 65536], got {adapters}.")
        memory = self.lora_server_memory_bytes
        if memory is not None and memory < 1:
            raise ValueError(f"lora_server_memory_bytes must be at least 1, got {memory}.")
        if not 0 <= self.local_expert_slots <= 4096:
            raise ValueError(
                f"local_expert_slots must be in [0, 4096], got {self.local_expert_slots}."
            )
        for name, allowed in CHOICES:
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
        self._check_nodes()
        self._check_transport()
        if not self.lora_server and self.lora_attention == "remote":
            raise ValueError(
                "--lora-attention remote is attention on a LoRA Server; add --lora-server with its "
                "number of ranks."
            )
        if not self.lora_server and self.local_expert_slots:
            raise ValueError(
                "--local-expert-slots are for when a LoRA Server is lost; add --lora-server with "
                "its number of ranks."
            )
        laid_out = (self.placement, adapters, memory)
        if not self.lora_server and any(option is not None for option in laid_out):
            raise ValueError(
                "--placement, --lora-server-adapters and --lora-server-memory-bytes say how a LoRA "
                "Server is laid out; add --lora-server with its number of ranks."
            )

    def _check_transport(self) -> None:
        """Raise ValueError for what other transports than that of one host are not for."""
        far = self.uses_ray or self.has_nodes
        if self.lora_separate_stream and (far or self.lora_server_transport != "auto"):
            raise ValueError(
                "--lora-separate-stream is for GPUs of one host; leave it out, or choose "
                "--lora-server-transport auto on one host."
            )
        if self.lora_server_transport != "nvshmem":
            return
        if not self.lora_server:
            raise ValueError(
                "--lora-server-transport nvshmem carries rows to a LoRA Server; add --lora-server "
                "with its number of ranks."
            )
        if self.local_expert_slots:
            raise ValueError(
                "--local-expert-slots let instances go on while the LoRA Server is lost, and with "
                "--lora-server-transport nvshmem they restart with it; leave one of them out."
            )

    def _check_nodes(self) -> None:
        """Raise ValueError for nodes that contradict each other."""
        if not 1 <= self.nnodes <= 64:
            raise ValueError(f"nnodes must be in [1, 64], got {self.nnodes}.")
        if not 1 <= self.master_port <= 65535:
            raise ValueError(f"master_port must be in [1, 65535], got {self.master_port}.")
        if self.uses_ray:
            self._check_ray()
            return
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"node_rank must be in [0, {self.nnodes - 1}] with --nnodes {self.nnodes}, got "
                f"{self.node_rank}: --nnodes is the number of hosts, the same on all of them."
            )
        if self.headless and not self.node_rank:
            raise ValueError(
                "--headless is for hosts without a front, those of --nnodes whose --node-rank is "
                "above 0: leave it out where requests are answered."
            )
        if self.nnodes == 1:
            return
        if self.spreads_roles and self.instances + self.lora_server < self.nnodes:
            raise ValueError(
                f"--nnodes {self.nnodes} has more hosts than --instances {self.instances} and "
                f"--lora-server {self.lora_server} have processes: start fewer nodes, or more "
                "instances."
            )
        if self.master_addr in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"--master-addr {self.master_addr} is no address that other nodes can connect to: "
                "give the address of host 0 that they reach, the same on all nodes."
            )
        if ":" in self.master_addr:
            raise ValueError(
                f"--master-addr {self.master_addr} has a colon: nodes meet over IPv4, and the port "
                "is --master-port's. Give host 0's IPv4 address, or a name that has one, without a "
                "port, the same on all nodes."
            )
        if self.nodes_secret_file is None:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --nodes-secret-file, the same on all nodes: whoever "
                "knows the secret runs code on them. openssl rand -hex 32 makes one."
            )

    def _check_ray(self) -> None:
        """Raise ValueError for what Ray does by itself, or does not go with it."""
        placed = {
            "--node-rank": self.node_rank != 0,
            "--master-addr": self.master_addr != ClusterConfig.master_addr,
            "--master-port": self.master_port != ClusterConfig.master_port,
            "--nodes-secret-file": self.nodes_secret_file is not None,
            "--headless": self.headless,
        }
        if given := [flag for flag, is_given in placed.items() if is_given]:
            raise ValueError(
                f"--distributed-executor-backend ray places and joins processes by itself: leave "
                f"{', '.join(given)} out, and give this command on one host only."
            )
        if self.nnodes > 1 and self.lora_server:
            raise ValueError(
                f"--lora-server serves instances of one host each: leave --nnodes {self.nnodes} "
                "out."
            )

    @property
    def uses_ray(self) -> bool:
        """True if Ray places the processes."""
        return self.distributed_executor_backend == "ray"

    @property
    def has_nodes(self) -> bool:
        """True if --nnodes are hosts on each of which this command is given."""
        return self.nnodes > 1 and not self.uses_ray

    @property
    def spreads_roles(self) -> bool:
        """True if --nnodes are hosts of several roles, each of which fits a host."""
        return self.has_nodes and self.instances + self.lora_server > 1

    @property
    def splits_model(self) -> bool:
        """True if --nnodes are hosts that one model is split over."""
        return self.nnodes > 1 and not self.spreads_roles

    @property
    def follows(self) -> bool:
        """True if this host only follows rank 0 of an instance over several hosts.

        Rank 0 alone reads adapters, templates, keys and certificates.
        """
        return self.splits_model and self.node_rank > 0

    @property
    def is_single(self) -> bool:
        """True if one process does it all."""
        one = self.instances == 1 and self.lora_server == 0 and self.nnodes == 1
        return one and not self.uses_ray


CHOICES = (
    ("distributed_executor_backend", BACKENDS),
    ("lora_kernel", LORA_KERNELS),
    ("lora_server_transport", TRANSPORTS),
    ("lora_attention", PLACES),
)
