"""Logits, min_p, top_k and top_p of rows, as keep_likely takes them."""

import jax.numpy as jnp
import numpy as np

Case = tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray, jnp.ndarray]


def likely_case(vocab: int, seed: int, spread: float = 3.0, digits: int | None = None) -> Case:
    """Return a row for each way to keep tokens, and for pairs of them; `digits` rounds logits."""
    ways = [
        (0.0, 0, 1.0),
        (0.0, 1, 1.0),
        (0.0, 20, 1.0),
        (0.0, 20, 0.95),
        (0.0, 0, 0.9),
        (0.0, 0, 1e-6),
        (0.05, 0, 1.0),
        (0.05, 50, 0.5),
        (0.9, 3, 1.0),
        (0.01, 0, 0.8),
        (0.0, vocab, 0.999),
        (0.0, 10 * vocab, 1.0),
        (0.0, vocab - 1, 1.0),
    ]
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(ways) + 2, vocab)).astype(np.float32) * spread
    if digits is not None:
        logits = np.round(logits, digits)
    logits[1, : min(2, vocab)] = [0.0, -0.0][: min(2, vocab)]  # equal floats of different bits
    logits[-2:] = np.where(rng.random((2, vocab)) < 0.9, -np.inf, logits[-2:])  # under a grammar
    logits[-2:, 0] = 1.0
    ways += [(0.0, 20, 0.95), (0.02, 0, 0.9)]
    min_p, top_k, top_p = (np.array(column) for column in zip(*ways, strict=True))
    rows = (jnp.asarray(v) for v in (min_p.astype("f4"), top_k.astype("i4"), top_p.astype("f4")))
    return jnp.asarray(logits), *rows


LIKELY_CASES = {
    "few tokens": likely_case(50, 0),
    "an odd vocabulary": likely_case(1003, 1),
    "many ties": likely_case(6000, 2, digits=0),
    "one logit": (jnp.zeros((2, 40)), jnp.zeros(2), jnp.array([7, 0]), jnp.array([1.0, 0.5])),
    "more than shared memory holds": likely_case(20000, 3, spread=1e-3),
}
