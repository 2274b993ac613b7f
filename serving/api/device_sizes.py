"""Sizes of a step where none are asked for: those of a CPU, or of an accelerator by its memory.

An accelerator reads all weights in each step, so it wants many rows; 512 tokens of a prompt at a
time would leave most of it idle. vLLM has the same two numbers of tokens. Where sequences decode a
step is shorter: as long as the products of a prompt still take several times what reading the
weights takes, and a model with experts reads more weights than a token uses.
"""

import dataclasses

from serving.api.config import CPU_TOKENS, EngineConfig

ACCELERATOR_SEQS = 256
ACCELERATOR_TOKENS, LARGE_TOKENS = 2048, 8192
MIXED_TOKENS, MIXED_EXPERT_TOKENS = 512, 2048
PORTABLE_TOKENS = 32  # half of a CPU's programs, which take half a minute each to compile
LARGE_BYTES = 48 << 30  # that JAX may use: of a device of 64 GiB, or of 54 that it has for itself


def for_device(
    config: EngineConfig,
    *,
    on_cpu: bool,
    device_bytes: int | None,
    alone: bool,
    has_experts: bool = False,
    portable: bool = False,
) -> EngineConfig:
    """Return the config with sequences and tokens of a step.

    `device_bytes` is what JAX may use of a device, None where that has no bound. An engine that is
    not `alone` has a CPU's sizes: its messages to a LoRA Server, or its turns, go by them. Of
    several devices the exchanges go by the tokens, so these are a CPU's too. `portable`: a CPU's
    ops have no kernels and run as portable JAX.
    """
    large = device_bytes is not None and device_bytes >= LARGE_BYTES
    seqs, tokens, mixed = config.step_seqs, config.step_tokens, config.mixed_step_tokens
    if alone and not on_cpu:
        usual = LARGE_TOKENS if large else ACCELERATOR_TOKENS
        if config.tensor_parallel_size > 1:
            usual = CPU_TOKENS
        seqs = config.max_num_seqs or ACCELERATOR_SEQS
        tokens = config.max_num_batched_tokens or usual
        if config.max_num_seqs is None:
            seqs = min(seqs, tokens, mixed or tokens)
        if mixed is None and config.max_num_batched_tokens is None:
            mixed = max(seqs, MIXED_EXPERT_TOKENS if has_experts else MIXED_TOKENS)
    elif alone and portable and config.max_num_batched_tokens is None:
        tokens = PORTABLE_TOKENS  # or the sequences, if they are more
    sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": max(seqs, tokens)}
    return dataclasses.replace(config, **sizes, mixed_step_tokens=mixed)
