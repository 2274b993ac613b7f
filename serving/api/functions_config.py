"""Configuration of isolated functions behind one command. No jax."""

import dataclasses

_KEEP_ALIVE_S = 300.0


@dataclasses.dataclass(frozen=True)
class FunctionsConfig:
    """Functions of one host; a value out of bounds is a ValueError naming the flag."""

    functions: str | None = None  # folder of adapters, each one a function; None: no functions
    functions_keep_alive_s: float = _KEEP_ALIVE_S  # without calls, until a function's process ends
    functions_memory_bytes: int | None = None  # of all functions' processes together
    functions_ttft_slo_s: float | None = None  # to a first token; None: 5 times a measured prefill

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
        limits = self.functions_keep_alive_s, memory, slo_s
        if self.functions is None and limits != (_KEEP_ALIVE_S, None, None):
            raise ValueError(
                "--functions-keep-alive-s, --functions-memory-bytes and --functions-ttft-slo-s are "
                "limits of functions: add --functions with the folder of their adapters."
            )
