"""Configuration of isolated functions behind one command. No jax."""

import dataclasses

_KEEP_ALIVE_S = 300.0
ISOLATIONS = ("none", "server", "process")


@dataclasses.dataclass(frozen=True)
class FunctionsConfig:
    """Functions of one host; a value out of bounds is a ValueError naming the flag."""

    functions: str | None = None  # folder of adapters, each one a function; None: no functions
    functions_keep_alive_s: float = _KEEP_ALIVE_S  # without calls, until a function's process ends
    functions_memory_bytes: int | None = None  # of all functions' processes together
    functions_ttft_slo_s: float | None = None  # to a first token; None: 5 times a measured prefill
    functions_isolation: str = "process"  # one of ISOLATIONS
    functions_max_tenants: int | None = None  # of isolation server and none; None: 16
    functions_verify_s: float | None = None  # between two hashes of the backbone; None: never

    def __post_init__(self) -> None:
        if not 0 < self.functions_keep_alive_s <= 1e9:
            raise ValueError(
                f"functions_keep_alive_s must be in (0, 1e9], got {self.functions_keep_alive_s}."
            )
        memory = self.functions_memory_bytes
        if memory is not None and memory < 1:
            raise ValueError(f"functions_memory_bytes must be at least 1, got {memory}.")
        slo_s = self.functions_ttft_slo_s
        if slo_s is not None and not 0 < slo_s < 1e6:
            raise ValueError(f"functions_ttft_slo_s must be in (0, 1e6), got {slo_s}.")
        verify_s = self.functions_verify_s
        if verify_s is not None and not 0 < verify_s < 1e6:
            raise ValueError(f"functions_verify_s must be in (0, 1e6), got {verify_s}.")
        self._check_isolation()
        given = [
            f"--{field.name.replace('_', '-')}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        if self.functions is None and given:
            raise ValueError(
                f"{', '.join(given)} must go with --functions: add it with the folder of "
                "adapters, or leave them out."
            )

    def _check_isolation(self) -> None:
        level, most = self.functions_isolation, self.functions_max_tenants
        if level not in ISOLATIONS:
            allowed = ", ".join(ISOLATIONS)
            raise ValueError(f"functions_isolation must be one of {allowed}, got {level!r}.")
        if most is not None and not 1 <= most <= 256:
            raise ValueError(f"functions_max_tenants must be in 1..256, got {most}.")
        if level == "process" and most is not None:
            raise ValueError(
                "functions_max_tenants is a size of isolation server or none: leave it out, or set "
                "--functions-isolation."
            )
        if level != "process" and self.functions_ttft_slo_s is not None:
            raise ValueError(
                "functions_ttft_slo_s gives functions turns; with functions_isolation "
                f"{level} one engine batches them all: leave it out."
            )
