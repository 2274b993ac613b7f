"""Dequantisation of MXFP4 weights (OCP Microscaling 1.0: e2m1 values, e8m0 scales, blocks of 32).

GPT-OSS checkpoints keep an expert matrix [out, in] as `*_blocks` [experts, out, groups, 16] and
`*_scales` [experts, out, groups]: 32 values of one row share a scale, and a byte holds two values,
the earlier one in its low half.
"""

import numpy as np

BLOCK = 32
_LARGEST_SCALE = 252  # 6 * 2**(253 - 127) is above float32's largest value; 255 means NaN
_CHUNK_BYTES = 1 << 18  # packed bytes expanded at a time: 2 MiB of float32 stay in the cache


def _pair_table() -> np.ndarray:
    """Return u64 [256]: the f32 values of a byte's low and high half, side by side in memory."""
    code = np.arange(16)
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = np.where(
        exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    )
    value = np.where(code >= 8, -magnitude, magnitude).astype(np.float32)
    byte = np.arange(256)
    return np.stack([value[byte & 15], value[byte >> 4]], axis=1).view(np.uint64)[:, 0]


def dequantize(
    blocks: np.ndarray, scales: np.ndarray, dtype: np.dtype, name: str = "MXFP4"
) -> np.ndarray:
    """Return [..., groups * 32] in `dtype`: value * 2**(scale - 127), exact in bf16 and f32.

    `blocks` is uint8 [..., groups, 16] and `scales` uint8 [..., groups]. Raises ValueError when the
    shapes do not belong together or a scale has no finite result (253 and above); `name` is that of
    the scales.
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"MXFP4 blocks and scales are uint8, not {blocks.dtype}, {scales.dtype}.")
    if blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"MXFP4 blocks {blocks.shape} do not fit scales {scales.shape}: "
            f"want {(*scales.shape, BLOCK // 2)}."
        )
    powers = powers_of_two(scales, name).reshape(-1)
    flat_blocks = blocks.reshape(-1, BLOCK // 2)
    out = np.empty((powers.size, BLOCK), dtype)
    pairs = _pair_table()
    step = _CHUNK_BYTES // (BLOCK // 2)
    for start in range(0, powers.size, step):
        part = slice(start, start + step)
        values = np.take(pairs, flat_blocks[part]).view(np.float32)
        values *= powers[part][:, None]
        out[part] = values.astype(dtype)
    return out.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def powers_of_two(scales: np.ndarray, name: str) -> np.ndarray:
    """Return float32 2**(scale - 127) of uint8 scales, each exact in bfloat16 too.

    Raises ValueError with the scales' name for one that has no finite result (253 and above).
    """
    if scales.size and scales.max() > _LARGEST_SCALE:
        raise ValueError(
            f"{name}: scale {scales.max()} is above {_LARGEST_SCALE}: 255 means NaN and "
            "253, 254 overflow float32."
        )
    powers = np.ldexp(np.float32(1), np.arange(_LARGEST_SCALE + 1) - 127, dtype=np.float32)
    return powers[scales]
