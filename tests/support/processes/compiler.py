"""Settings of XLA's compiler in tests: fast, or as a user's process has them."""

from collections.abc import Mapping, MutableMapping

# LLVM without optimisation, fusions written without MLIR, one module instead of up to 32: the same
# HLO, other machine code.
_FAST = (
    "--xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def compile_fast(environment: MutableMapping[str, str]) -> None:
    """Have XLA spend little on programs, in this process and those that it starts."""
    flags = environment.get("XLA_FLAGS", "")
    if _FAST not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_FAST}".strip()


def as_shipped(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that compiles as a user's does."""
    flags = environment.get("XLA_FLAGS", "").replace(_FAST, "").strip()
    return {**environment, "XLA_FLAGS": flags}
