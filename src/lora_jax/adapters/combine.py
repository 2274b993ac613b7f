"""Write one PEFT adapter folder from several, as PEFT's add_weighted_adapter combines them.

python -m lora_jax.adapters.combine law summary --weights 0.7 0.5 \\
    --combination-type ties --density 0.5 --out law-summary

No base model, torch or GPU is needed. Folders are combined by tensor names.
"""

import argparse
import dataclasses
import json
import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lora_jax import strict_json
from lora_jax.adapters.composition import MOST_WEIGHT
from lora_jax.adapters.formats import peft_experts, safetensors_file
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.formats.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftReadLimits,
    check_files,
    read_config,
)
from lora_jax.adapters.formats.peft_names import LoraPair, pair_up
from lora_jax.adapters.formats.safetensors_file import FileLimits
from lora_jax.adapters.merge_methods import (
    COMBINATION_TYPES,
    SIGN_METHODS,
    Method,
    Pair,
    combine_pairs,
)

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MOST_ADAPTERS = 16
_PREFIX = "base_model.model."
_CONFIG_BYTES, _CONFIG_VALUES = 1 << 20, 1 << 17
# These say which modules of the base model have LoRA, besides target_modules.
_PLACES = ("exclude_modules", "layers_pattern", "layers_to_transform")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Source:
    """One adapter folder, its tensors not yet looked at."""

    path: Path
    config: PeftConfig
    raw: dict[str, Any]  # adapter_config.json
    pairs: dict[str, LoraPair]  # by module path

    @property
    def max_rank(self) -> int:
        """The largest rank that the config names, as PEFT has it."""
        return max(self.config.rank, *(rank for _, rank in self.config.rank_pattern), 1)


def combine(
    folders: Sequence[Path],
    weights: Sequence[float],
    out: Path,
    method: Method,
    *,
    dtype: str = "float32",
    base_name: str | None = None,
) -> None:
    """Write the folder `out`, whole or not at all; rank and lora_alpha are equal, so scaling is 1.

    Raises ValueError naming the folder, file, tensor or argument that is wrong.
    """
    _check(folders, weights, out)
    sources = [read_source(folder) for folder in folders]
    rank = _rank_of(sources, method)
    config = _config_of(sources, rank, _base_of(sources, base_name))
    tensors = _tensors_of(sources, weights, rank, method, dtype)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        scratch = Path(temporary) / out.name
        scratch.mkdir()
        save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True)
        (scratch / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        scratch.rename(out)
    _log.info("%s: rank %d, %d modules", out, rank, len(tensors) // 2)


def _check(folders: Sequence[Path], weights: Sequence[float], out: Path) -> None:
    """Raise ValueError for arguments that cannot be, before anything is read."""
    if not 2 <= len(folders) <= MOST_ADAPTERS:
        raise ValueError(f"2 to {MOST_ADAPTERS} adapters can be combined, got {len(folders)}.")
    if len(weights) != len(folders):
        raise ValueError(f"{len(folders)} adapters need as many weights, got {len(weights)}.")
    for folder, weight in zip(folders, weights, strict=True):
        if not math.isfinite(weight) or not 0 < abs(weight) <= MOST_WEIGHT:
            raise ValueError(
                f"the weight of {folder} must be a number other than 0 in [-{MOST_WEIGHT:g}, "
                f"{MOST_WEIGHT:g}], got {weight!r}."
            )
    if out.exists():
        raise ValueError(f"{out} exists; name a new folder.")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} in.")


def read_source(path: Path) -> Source:
    """Return what a folder holds; ValueError naming it for what cannot be combined."""
    limits = PeftReadLimits()
    try:
        folder = AdapterFolder(path)
        check_files(folder)
        config = read_config(folder)
        raw = strict_json.read_object(folder.read(CONFIG_FILE, _CONFIG_BYTES), _CONFIG_VALUES)
        most = limits.max_file_bytes
        pairs = pair_up(safetensors_file.read_file(folder, WEIGHTS_FILE, most, FileLimits()))
        if config.target_parameters:
            raise ValueError(
                "target_parameters cannot be combined, nor by PEFT; a request may name both."
            )
        if not pairs:
            raise ValueError("no LoRA matrices.")
        config.check_size(len(pairs))
        for pair in pairs.values():
            _check_pair(pair, config)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path}: {error}") from None
    return Source(path, config, raw, pairs)


def _check_pair(pair: LoraPair, config: PeftConfig) -> None:
    a, b = pair.a.shape, pair.b.shape
    if peft_experts.container_of(pair.path) or len(a) != 2 or len(b) != 2:
        raise ValueError(f"{pair.a.name} holds several experts, which cannot be combined.")
    if a[0] != b[1]:
        raise ValueError(f"{pair.a.name} has shape {a}, {pair.b.name} {b}: their ranks differ.")
    if a[0] != config.rank_of(pair.path):
        raise ValueError(
            f"{pair.a.name} has rank {a[0]}, the config says {config.rank_of(pair.path)}."
        )


def _rank_of(sources: list[Source], method: Method) -> int:
    """Return the rank of the result: the sum for `cat`, else that of all."""
    ranks = [source.max_rank for source in sources]
    if method.combination_type == "cat":
        return sum(ranks)
    if len(set(ranks)) > 1:
        listed = ", ".join(f"{s.path} {rank}" for s, rank in zip(sources, ranks, strict=True))
        raise ValueError(f"{method.combination_type} needs equal ranks: {listed}. cat takes any.")
    return ranks[0]


def _base_of(sources: list[Source], base_name: str | None) -> str | None:
    """Return the base model's name; ValueError where the adapters name different ones."""
    if base_name is not None:
        return base_name
    named = {s.path: s.config.base_model for s in sources if s.config.base_model}
    if len({PurePosixPath(name).name for name in named.values()}) > 1:
        listed = ", ".join(f"{path} {name!r}" for path, name in named.items())
        raise ValueError(f"the adapters name different base models: {listed}. Set --base-name.")
    return next(iter(named.values()), None)


def _config_of(sources: list[Source], rank: int, base_name: str | None) -> dict[str, Any]:
    """Return adapter_config.json of the result."""
    first = sources[0].raw
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type"),
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,  # PEFT keeps the first one's, which scales by sqrt(rank) again
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": bool(first.get("fan_in_fan_out")),
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": _target_modules(sources),
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "use_dora": False,
    }


def _target_modules(sources: list[Source]) -> list[str]:
    """Return the union of the lists; full paths where a pattern or layers choose the modules."""
    lists = [source.raw.get("target_modules") for source in sources]
    chosen = any(source.raw.get(key) for source in sources for key in _PLACES)
    if chosen or not all(isinstance(found, list) and found for found in lists):
        return sorted({path for source in sources for path in source.pairs})
    return sorted({name for source in sources for name in source.config.target_modules})


def _tensors_of(
    sources: list[Source], weights: Sequence[float], rank: int, method: Method, dtype: str
) -> dict[str, np.ndarray]:
    """Return the named tensors of the result, every module's with the same rank.

    Missing ranks are zeros, as in PEFT. Values of dare_* are drawn in the order of module paths.
    """
    rng = np.random.default_rng(method.seed)
    tensors = {}
    for path in sorted({path for source in sources for path in source.pairs}):
        holders = [(s, w) for s, w in zip(sources, weights, strict=True) if path in s.pairs]
        _check_shapes(path, [source for source, _ in holders], method)
        try:
            pairs = [(s.pairs[path].a.read(), s.pairs[path].b.read()) for s, _ in holders]
        except ValueError as error:
            raise ValueError(f"{' or '.join(str(s.path) for s, _ in holders)}: {error}") from None
        scalings = [s.config.scaling_of(path, s.pairs[path].a.shape[0]) for s, _ in holders]
        combined = combine_pairs(pairs, [weight for _, weight in holders], scalings, method, rng)
        for side, matrix in zip("AB", _padded(combined, rank), strict=True):
            name = f"{_PREFIX}{path}.lora_{side}.weight"
            tensors[name] = _as(matrix, dtype, name)
    return tensors


def _check_shapes(path: str, sources: list[Source], method: Method) -> None:
    """Raise ValueError naming a module whose matrices do not fit together."""
    first = sources[0].pairs[path]
    for source in sources[1:]:
        other = source.pairs[path]
        sizes = [(pair.a.shape[1], pair.b.shape[0]) for pair in (first, other)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{path} maps {sizes[0][0]} to {sizes[0][1]} in {sources[0].path}, "
                f"{sizes[1][0]} to {sizes[1][1]} in {source.path}: not the same base model."
            )
        ranks = first.a.shape[0], other.a.shape[0]
        if method.combination_type != "cat" and ranks[0] != ranks[1]:
            raise ValueError(
                f"{path} has rank {ranks[0]} in {sources[0].path} and {ranks[1]} in "
                f"{source.path}; {method.combination_type} needs equal ranks, cat takes any."
            )


def _padded(pair: Pair, rank: int) -> Pair:
    """Return the pair with zeros up to the rank."""
    more = rank - len(pair[0])
    return np.pad(pair[0], ((0, more), (0, 0))), np.pad(pair[1], ((0, 0), (0, more)))


def _as(matrix: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Return the matrix in `dtype`; ValueError naming it where a value does not fit."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(matrix.astype(DTYPES[dtype]))
    if not np.isfinite(narrow.astype(np.float32)).all():
        raise ValueError(f"{name} of the result has values too large for {dtype}.")
    return narrow


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.adapters.combine")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("adapters", type=Path, nargs="+", help="PEFT LoRA folders")
    add("--weights", type=float, nargs="+", help="weight of each adapter (default: 1)")
    add("--combination-type", choices=COMBINATION_TYPES, default="cat")
    add("--density", type=float, help="fraction of values that ties and dare_* keep")
    add(
        "--majority-sign-method",
        choices=SIGN_METHODS,
        default="total",
        help="how ties and dare_ties elect signs",
    )
    add("--seed", type=int, default=0, help="seed of dare_*")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="data type of the file")
    add("--base-name", help="base_model_name_or_path (default: the adapters')")
    add("--out", type=Path, required=True, help="folder to write; it must not exist")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    weights = args.weights or [1.0] * len(args.adapters)
    try:
        method = Method(args.combination_type, args.density, args.majority_sign_method, args.seed)
        combine(
            args.adapters, weights, args.out, method, dtype=args.dtype, base_name=args.base_name
        )
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
