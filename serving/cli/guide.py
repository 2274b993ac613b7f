"""Tables of the guide "LoRA and QLoRA for Serving" for a model, and its sums done again. No jax."""

import dataclasses
from collections.abc import Sequence

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slot_sizes import rows_per_adapter
from lora_jax.placement.picture import spell_bytes
from lora_jax.placement.tiers import top_share, zipf
from lora_jax.rank_rows import rows_nbytes

MONTH_H = 730
RANKS = (4, 8, 16, 32, 64, 128, 256)
_POOL_BYTES = 10e9  # of the guide's table of ranks
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

# The guide's model, Llama-2-70B, and its GPU, an A100 of 80 GB.
_LAYERS, _WIDTH, _KV_WIDTH = 80, 8192, 1024  # 8 KV heads of 128
_PARAMETERS = 70e9
_GPU_BYTES, _GPU_BYTES_PER_S, _PRICE = 80e9, 2.039e12, 2.0
_NF4_BYTES = 0.5 + 4 / 64  # of a weight: 4 bits, and a float32 scale for 64


def attention_of(catalogue: LoraCatalogue) -> tuple[str, ...]:
    """Return the maps of attention that the guide's adapters change, as far as there are any."""
    return tuple(name for name in _ATTENTION if name in catalogue.modules)


def adapter_bytes(
    catalogue: LoraCatalogue, rank: int, itemsize: int, modules: Sequence[str] = ()
) -> int:
    """Return the bytes of an adapter of one rank on these modules of every layer, or on all.

    Raises ValueError for a module that the model has not.
    """
    unknown = next((name for name in modules if name not in catalogue.modules), None)
    if unknown is not None:
        names = ", ".join(catalogue.module_names)
        raise ValueError(f"modules has {unknown!r}; the model has {names}.")
    return rows_nbytes(rows_per_adapter(part_of(catalogue, modules), rank), itemsize)


def part_of(catalogue: LoraCatalogue, modules: Sequence[str]) -> LoraCatalogue:
    """Return the catalogue of these modules alone, of all where none is named."""
    if not modules:
        return catalogue
    some = {name: catalogue.modules[name] for name in modules}
    return dataclasses.replace(catalogue, modules=some)


def guide_lines(catalogue: LoraCatalogue, weights: int, itemsize: int) -> list[str]:
    """Return the guide's tables for a model of `weights` bytes, then its sums done again."""
    modules = attention_of(catalogue)
    lines = [
        f"The guide's table of ranks for this model, adapters on {', '.join(modules) or 'all'}:",
        "  rank | an adapter | in the model's bytes | in 10 GB | more multiplications there",
    ]
    for rank in RANKS:
        size = adapter_bytes(catalogue, rank, itemsize, modules)
        row = (
            f"{rank:<4}",
            spell_bytes(size).ljust(10),
            f"{weights // size:<20,}",
            f"{int(_POOL_BYTES // size):<8,}",
            f"{_more_work(catalogue, rank, modules):.2%}",
        )
        lines.append("  " + " | ".join(row))
    lines.append("The guide's numbers that do not add up (Llama-2-70B on A100s of 80 GB):")
    return lines + [f"  {said}: {true}" for said, true in guide_sums()]


def _more_work(catalogue: LoraCatalogue, rank: int, modules: Sequence[str]) -> float:
    """Return the multiplications of an adapter over those of the maps that it changes."""
    more = plain = 0
    for name in modules or catalogue.module_names:
        module = catalogue.modules[name]
        count = len(module.layers) * max(module.num_experts, 1)
        more += count * rank * (module.d_in + module.d_out)
        plain += count * module.d_in * module.d_out
    return more / plain


def guide_sums() -> list[tuple[str, str]]:
    """Return what the guide says, and what its own assumptions give."""
    model = 2 * _PARAMETERS
    grouped = 2 * 16 * _LAYERS * (4 * _WIDTH + 2 * (_WIDTH + _KV_WIDTH))
    shares = zipf(1000, 1.0)
    tops = {count: f"{top_share(shares, count):.0%}" for count in (14, 30, 59)}
    on_host = top_share(shares, 200) - top_share(shares, 30)
    copies = 1000 * model / _GPU_BYTES
    return [
        ("1,000 copies of 140 GB take 35 PB", f"{spell_bytes(1000 * model)}, as it says later"),
        (
            "an adapter of rank 16 on q, k, v, o takes 168 MB",
            f"k and v are {_KV_WIDTH} wide (8 KV heads), so {spell_bytes(grouped)}",
        ),
        (
            "rank 16 adds 0.2% of FLOPs",
            "its 2rd counts multiplications, its 2d^2 also additions; counted alike "
            f"{2 * 16 / _WIDTH:.1%}",
        ),
        (
            "training an adapter takes 44 GB with the FP16 base",
            f"that base alone takes {spell_bytes(model)}; in 4 bits {_nf4()}",
        ),
        ("the 4-bit base takes 35 GB", f"{_nf4()} with its scales, as it says later"),
        ("30 of 1,000 adapters by Zipf 1.0 get 80 to 85% of requests", tops[30]),
        ("59 of them get 90%, 14 get 60%", f"{tops[59]} and {tops[14]}"),
        (
            "12% of requests find theirs on the host (top 200), 3% on disk",
            f"{on_host:.0%} and {1 - top_share(shares, 200):.0%}",
        ),
        ("580 requests/s on one GPU with 40 GB of KV cache", _most_requests()),
        (f"{copies:,.0f} GPUs at $2 an hour cost $3,500,000 a month", _month(copies)),
        ("4 GPUs cost $8,000", f"{_month(4)}; both are 1,000 hours, so 437 times still holds"),
    ]


def _nf4() -> str:
    return spell_bytes(_PARAMETERS * _NF4_BYTES)


def _month(gpus: float) -> str:
    return f"${gpus * _PRICE * MONTH_H:,.0f} in {MONTH_H} hours"


def _most_requests() -> str:
    """Return how many requests of 200 tokens in and 200 out a second fit the KV cache."""
    tokens = 40e9 / (_LAYERS * 2 * _KV_WIDTH * 2)
    step_s = _PARAMETERS * _NF4_BYTES / _GPU_BYTES_PER_S
    at_once = tokens / 400
    return (
        f"those are {tokens:,.0f} tokens, {at_once:.0f} requests of 200 in and 200 out; a step "
        f"reads the weights in {1000 * step_s:.0f} ms, so at most {at_once / (200 * step_s):.0f}"
    )
