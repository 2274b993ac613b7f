"""Configuration of isolated functions behind one command. No jax."""

import dataclasses

_KEEP_ALIVE_S = 300.0


@dataclasses.dataclass(frozen=True)
class FunctionsConfig:
    """Functions of one host; a value out of bounds is a ValueError naming the flag."""

    functions: str | None = None  # folder of adapters, each one a function; None: no functions
    functions_keep_alive_s: float = _KEEP_ALIVE_S  # without calls, until a function's process ends

    def __post_init__(self) -> None:
        if not 0 < self.functions_keep_alive_s <= 1e9:
            raise ValueError(
                f"functions_keep_alive_s must be in (0, 1e9], got {self.functions_keep_alive_s}."
            )
        if self.functions is None and self.functions_keep_alive_s != _KEEP_ALIVE_S:
            raise ValueError(
                "--functions-keep-alive-s is a limit of functions: add --functions with the folder "
                "of their adapters."
            )
