"""The full grid of grouped LoRA: every point at which a peer was measured on an H200.

Peers are the best of vLLM 0.33 (as shipped, with active grids, tuned), SGLang 0.5.23 (csgmv, sgemm,
triton_v2), FlashInfer's bgmv_moe and torch's grouped matmul, timed in CUDA graphs with cold
buffers; the best differs from cell to cell. The last two were given sorted rows and add to no y:
where one of them is the best at a linear map, our sums without y stand beside it, and those with
y beside the best of the others. Ours of a layer of experts always add to y, and sort the rows.
"""

from bench.kernels import lora, moe
from bench.kernels.jobs import Job, Machine

WIDE = 14336  # d_out of the expand; d_in is 4096

# popularity, adapters, tokens, rank: best peer's microseconds of shrink, expand and pair
DENSE = {
    ("zipf", 512, 1, 64): (None, None, None),
    ("zipf", 512, 8, 64): (None, None, None),
    ("zipf", 512, 32, 64): (None, None, None),
    ("zipf", 512, 64, 64): (10.5, 22.0, 34.0),
    ("zipf", 512, 128, 64): (14.0, 35.7, 51.0),
    ("zipf", 512, 256, 64): (20.2, 60.9, 81.0),
    ("zipf", 512, 512, 64): (31.1, 104.1, 131.0),
    ("zipf", 512, 1024, 64): (46.7, 144.5, 182.6),
    ("zipf", 512, 4096, 64): (None, None, None),
    ("zipf", 512, 1024, 8): (18.1, 102.3, None),
    ("zipf", 512, 1024, 16): (18.4, 75.7, None),
    ("zipf", 512, 1024, 32): (27.6, 93.9, None),
    ("zipf", 512, 1024, 128): (62.4, 270.4, None),
    ("distinct", 1024, 1024, 64): (147.0, 498.0, None),
    ("uniform", 32, 1024, 64): (15.4, 77.5, None),
    ("skewed", 16, 1024, 64): (12.5, 54.7, None),
    ("identical", 512, 1024, 64): (8.6, 27.8, None),
    ("distinct", 64, 64, 64): (14.9, 35.9, None),
    ("uniform", 8, 64, 64): (7.1, 10.7, None),
    ("identical", 512, 64, 64): (5.6, 6.0, None),
    ("uniform", 4, 4096, 64): (18.9, 99.9, None),
}
# Of those, what a peer does faster that adds to no y: expand and pair.
DENSE_SUMS = {("uniform", 4, 4096, 64): {"expand": 51.1, "pair": 18.9 + 51.1}}
# model and rank: (tokens, best peer's microseconds with 1, 128 and 512 adapters)
MOE = {
    ("mixtral-8x7b", 64): ((16, 94, 120, 126), (256, 208, 517, 588), (1024, 562, 1412, 1780)),
    ("qwen3-30b-a3b", 32): ((16, 32, 45, 45), (256, 60, 232, 300), (1024, 138, 627, 717)),
    ("deepseek-v2-lite", 32): ((16, 33, 43, 43), (256, 64, 203, 241), (1024, 163, 556, 622)),
}


def dense_points() -> list[lora.Point]:
    """Return shrink, expand and pair of every dense cell; a pair without a peer has their sum."""
    results = []
    for cell, (shrink, expand, pair) in DENSE.items():
        peers = {"shrink": shrink, "expand": expand, "pair": pair or (shrink and shrink + expand)}
        results += [_dense_point(cell, op, peer) for op, peer in peers.items()]
        sums = DENSE_SUMS.get(cell, {})
        results += [_dense_point(cell, op, peer, adds=False) for op, peer in sums.items()]
    return results


def _dense_point(cell: tuple, op: str, peer: float | None, *, adds: bool = True) -> lora.Point:
    popularity, slots, tokens, rank = cell
    name = f"{tokens} tokens, {popularity} over {slots}" + ("" if adds else ", without y")
    return lora.Point(name, op, tokens, WIDE, rank, slots, popularity, adds=adds, peer_us=peer)


def moe_points() -> list[moe.Point]:
    """Return the layers of experts; those of one model follow one another, and share weights."""
    return [
        moe.Point(model, tokens, rank, adapters, peer_us=float(peer))
        for (model, rank), lines in MOE.items()
        for tokens, *peers in lines
        for adapters, peer in zip((1, 128, 512), peers, strict=True)
    ]


def points() -> tuple[lora.Point | moe.Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says; they have no bar but the peer."""
    return (*dense_points(), *moe_points())


def jobs(points: list[lora.Point | moe.Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    dense = lora.jobs([p for p in points if isinstance(p, lora.Point)], machine)
    return [*dense, *moe.jobs([p for p in points if isinstance(p, moe.Point)], machine)]
