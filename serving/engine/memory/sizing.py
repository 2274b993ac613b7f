"""Sizes of KV pages and adapter slots, and the longest sequence. No jax."""

import dataclasses

from serving.api.config import EngineConfig

DEFAULT_KV_BYTES = 256 << 20
DEFAULT_LORA_BYTES = 512 << 20
# Of what weights leave of an accelerator's memory: where adapters may come, and where they will.
LORA_SHARE, ASKED_LORA_SHARE = 0.25, 0.5


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Pages of `page_size` tokens, and the longest sequence in tokens."""

    num_pages: int
    page_size: int
    max_model_len: int
    num_host_pages: int = 0  # in host memory
    step_bytes: int = 0  # planned for a step's own arrays, on a device with a limit


def free_bytes(config: EngineConfig, limit: int, used: int, step: int = 0) -> int:
    """Return what gpu_memory_utilization of `limit` bytes leaves for KV pages and adapters.

    `used` is what the weights take; the rest of the limit is for a step's own arrays, which take
    `step` bytes: what it lacks for them is left free too. Raises ValueError when nothing is left.
    """
    share = config.gpu_memory_utilization
    left = min(int(share * limit), limit - step) - used
    if left > 0:
        return left
    if int(share * limit) > used:
        raise ValueError(
            f"Weights ({used} bytes) and a step's own arrays ({step} bytes) leave no room for KV "
            f"pages and adapters in {limit} bytes. Lower max_num_batched_tokens, max_num_seqs or "
            "max_model_len, or set kv_cache_memory_bytes."
        )
    raise ValueError(
        f"Weights ({used} bytes) leave no room for KV pages and adapters in {share} of {limit} "
        "bytes. Raise gpu_memory_utilization."
    )


def kv_bytes(free: int, adapters: int) -> int:
    """Return what the adapter slots leave of `free` bytes. Raises ValueError: nothing."""
    if adapters >= free:
        raise ValueError(
            f"Adapter slots of {adapters} bytes leave no room for KV pages: weights leave {free} "
            "bytes. Lower lora_memory_bytes, max_loras or max_lora_rank."
        )
    return free - adapters


def longest_wanted(config: EngineConfig, model_positions: int) -> int:
    """Return the tokens of the longest sequence asked for. Raises ValueError: the model has fewer.

    Without max_model_len it is as long as the model's positions are.
    """
    wanted = config.max_model_len or model_positions
    if wanted > model_positions:
        raise ValueError(
            f"max_model_len is {wanted}, but the model has {model_positions} positions. Lower "
            "max_model_len."
        )
    return wanted


def cache_size(
    config: EngineConfig,
    bytes_per_token: int,
    model_positions: int,
    free: int | None = None,
    step: int = 0,
) -> CacheSize:
    """Return pages for max_num_seqs sequences of full length, within the byte budget.

    Without kv_cache_memory_bytes the budget is `free` bytes, on a CPU DEFAULT_KV_BYTES; a step's
    own arrays, which take `step` bytes, have been left free for. A
    max_model_len that was not asked for shrinks to what the pages hold; one that was asked for must
    fit. Raises ValueError.
    """
    page_size = config.block_size
    wanted = longest_wanted(config, model_positions)
    budget = config.kv_cache_memory_bytes or (DEFAULT_KV_BYTES if free is None else free)
    affordable = budget // (bytes_per_token * page_size)
    if affordable < 1:
        raise ValueError(
            f"One KV page of {page_size} tokens takes {bytes_per_token * page_size} bytes; the "
            f"budget is {budget}{_beside(step)}. Raise kv_cache_memory_bytes or "
            "gpu_memory_utilization, or lower block_size."
        )
    longest = min(wanted, affordable * page_size)
    if config.max_model_len and longest < wanted:
        other = "raise kv_cache_memory_bytes"
        if free is not None and not config.kv_cache_memory_bytes:  # adapters have the rest
            other = "give adapters less by lora_memory_bytes, max_loras or max_lora_rank"
        raise ValueError(
            f"A sequence of max_model_len {wanted} takes {wanted * bytes_per_token} bytes of KV "
            f"cache; the budget is {budget}{_beside(step)}. Lower max_model_len"
            f"{', max_num_batched_tokens or max_num_seqs' if step else ''}, or {other}."
        )
    pages = min(affordable, config.step_seqs * -(-longest // page_size))
    return CacheSize(pages, page_size, longest, step_bytes=step)


def _beside(step: int) -> str:
    return f", beside {step} bytes for a step's own arrays" if step else ""


def host_pages(config: EngineConfig, page_bytes: int, memory: int) -> int:
    """Return the KV pages that kv_offloading_size has room for, in a host of `memory` bytes.

    Raises ValueError: not one, or more than the host has memory.
    """
    budget = int(config.kv_offloading_size * (1 << 30))
    if not budget:
        return 0
    if budget > memory:
        raise ValueError(
            f"kv_offloading_size is {config.kv_offloading_size:g} GiB; the host has "
            f"{memory / (1 << 30):.1f} GiB of memory."
        )
    if budget < page_bytes:
        raise ValueError(
            f"kv_offloading_size is {budget} bytes; one KV page of {config.block_size} tokens "
            f"takes {page_bytes}."
        )
    return budget // page_bytes


def lora_share(config: EngineConfig, num_given: int) -> float:
    """Return the most of an accelerator's free memory that adapters take.

    It is half where adapters are given at the start, or may be loaded from a folder.
    """
    return ASKED_LORA_SHARE if num_given or config.lora_dir is not None else LORA_SHARE


def adapter_bytes(
    config: EngineConfig,
    one_adapter: int,
    free: int | None = None,
    share: float = LORA_SHARE,
    usual: int | None = None,
) -> int:
    """Return the byte budget of the adapter slots.

    `one_adapter` is what an adapter of max_lora_rank on every module takes, `usual` what one of the
    largest rank takes that adapters have, None: as much. Without lora_memory_bytes there is room
    for max_loras usual adapters, but no more than `share` of the `free` bytes, on a CPU
    DEFAULT_LORA_BYTES, unless a single one of max_lora_rank needs more.
    """
    if config.lora_memory_bytes is not None:
        return config.lora_memory_bytes
    most = DEFAULT_LORA_BYTES if free is None else int(share * free)
    return max(one_adapter, min(config.max_loras * (usual or one_adapter), most))


def whole_adapters(one: dict[int, int], rows: dict[int, int]) -> int:
    """Return how many adapters that take `one` rows of each width find room in `rows` at a time."""
    return min((rows.get(width, 0) // count for width, count in one.items() if count), default=0)


def shortage_line(
    config: EngineConfig,
    held: int,
    one_adapter: int,
    flag: str,
    num_bytes: int,
    needed: int,
    *,
    rank: int | None = None,
) -> str | None:
    """Return the log line that fewer adapters fit than max_loras allows; None: all fit.

    `num_bytes` hold `held` adapters of `rank`, by default max_lora_rank, on every module, each of
    `one_adapter` bytes; `needed` is the value of the flag that has room for max_loras of them.
    """
    if held >= config.max_loras:
        return None
    adapters = "1 adapter" if held == 1 else f"{held} adapters"
    adapters += f" of rank {rank or config.max_lora_rank}"
    return (
        f"LoRA memory of {num_bytes / 1e6:.1f} MB holds {adapters} "
        f"on every module ({one_adapter / 1e6:.1f} MB each), --max-loras is "
        f"{config.max_loras}: requests for more than {held} at a time wait for exchanges. "
        f"{flag} {needed} has room for all {config.max_loras}."
    )
