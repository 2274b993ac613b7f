"""Loads a checkpoint folder into a model on its devices, tensor by tensor, slice by slice.

Every parameter is made of checkpoint tensors by the model's weight rules and every tensor is
used, or nothing is loaded. The host holds one parameter's slice on top of what is loaded.

Quantised matrices stay so where a product reads them (`coded` in a parameter's metadata); others,
such as routers and embeddings, are made plain. So are a tower's whose scales no row has to itself.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax import strict_json
from lora_jax.config import ModelConfig, from_hf
from lora_jax.models.checkpoint import Checkpoint, Index
from lora_jax.models.quantised import with_quantised
from lora_jax.models.quantised.bitsandbytes import StraddlingTensor
from lora_jax.models.quantised.gptq import GptqTensor
from lora_jax.models.registry import abstract, model_class, stored_shape
from lora_jax.models.sources import Source, Tensor, WeightRule
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.ops.grouped_matmul.orders import (
    for_kernels,
    known_in_order,
    order_of,
    put_in_order,
)
from lora_jax.ops.grouped_matmul.weights import ROWS
from lora_jax.sharding import Split, weight_sharding

IGNORED = (r".*\.rotary_emb\.inv_freq",)  # made from the config; old releases stored it
# Of KV pages in 8 bits, in the names of llm-compressor, AutoFP8 and ModelOpt. Pages have their own.
_KV_SCALES = (r".*\.self_attn\.(q|k|v|kv)_scale", r".*\.[kv]_proj\.(output|k|v)_scale")
HEAD, TOWER = "lm_head.weight", "tower."
_FLOATS = ("float64", "float32", "float16", "bfloat16")  # what plain weights are stored in
_MOST_NAMES = 20  # listed in an error
Axes = tuple[str | None, ...]  # of a parameter, by their logical names
Fill = Callable[[Index, np.ndarray], None]  # reads a slice of a tensor into an array
# Makes the array of a name, shape and dtype, with `Fill` if it wants the files' values.
Place = Callable[[str, tuple[int, ...], np.dtype, Fill], jax.Array]
_ALIGNMENT = 64  # jax takes over host memory that is aligned so, without a copy


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    split: Split | None = None,
    plain: bool = False,
    place: Place | None = None,
) -> tuple[AbstractCausalLM, ModelConfig]:
    """Return the model of a checkpoint folder, on the devices of a split or on the first.

    `dtype` None keeps the checkpoint's (float16 becomes float32, which every device computes).
    With `plain` no weight stays quantised: all are the values that the files stand for. `place`
    makes the arrays of a model on one device somewhere else than in jax's own memory.

    Raises:
        ValueError: config or dtype are not supported, or tensors are missing, left over or
            misshapen.
    """
    if place is not None and split is not None:
        raise ValueError("weights in a memory of their own are those of one device, without split.")
    folder = Path(path)
    config, files = read_config(folder), Checkpoint(folder)
    kind = model_class(config.model_type)
    wanted = checkpoint_dtype(config, files) if dtype is None else supported_dtype(dtype)
    files = with_quantised(files, config.quantization, np.dtype(wanted))
    graphdef, state = abstract(config, wanted, split)
    params = {_dotted(path): (path, param) for path, param in nnx.to_flat_state(state)}
    shapes = {name: stored_shape(param, config) for name, (_, param) in params.items()}
    plan = plan_load(kind.weight_rules(config), shapes, files)
    check_leftovers(plan, files, config)
    put = functools.partial(_putter, split=split, place=place)
    loaded = []
    for name, (key, param) in params.items():
        whole = plain or (name.startswith(TOWER) and _straddles(plan[name], files))
        weight = read_weight(param, plan[name], files, put(name), plain=whole)
        weight = for_kernels(weight) if place is None else known_in_order(weight)
        loaded.append((key, param.replace(weight)))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded)), config


def read_config(folder: Path) -> ModelConfig:
    """Return the config of a checkpoint folder.

    Raises:
        ValueError: there is none, it is not JSON, or it is not supported.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}; models are folders, nothing is downloaded.")
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder.name} holds no config.json.")
    try:
        raw = strict_json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config.json of {folder.name} is not JSON.") from error
    except ValueError as error:
        raise ValueError(f"config.json of {folder.name}: {error}") from error
    return from_hf(raw)


def checkpoint_dtype(config: ModelConfig, files: Checkpoint) -> jnp.dtype:
    """Return float32 or bfloat16: what the config says, else as most floats are stored."""
    dtype_name = config.dtype
    if dtype_name is None:
        sizes: dict[str, int] = {}
        for tensor in files.tensors.values():
            if tensor.dtype.name in _FLOATS:
                items = int(np.prod(tensor.shape, dtype=np.int64))
                sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + items
        dtype_name = max(sizes, key=lambda name: sizes[name], default="float32")
    return jnp.dtype(jnp.bfloat16 if dtype_name == "bfloat16" else jnp.float32)


def supported_dtype(dtype: Any) -> jnp.dtype:
    """Return the dtype of a model's weights; ValueError for one that no op computes in."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {jnp.dtype(dtype)} is not supported, only float32 and bfloat16.")
    return jnp.dtype(dtype)


def plan_load(
    rules: tuple[WeightRule, ...], shapes: dict[str, tuple[int, ...]], files: Checkpoint
) -> dict[str, Source]:
    """Return the source of every parameter.

    Raises:
        ValueError: listing tensors that are missing, have another shape than the model or are
            integers.
    """
    plan: dict[str, Source] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for name, shape in shapes.items():
        choices = [source for rule in rules for source in rule.match(name)]
        if not choices:
            raise ValueError(f"No weight rule makes parameter {name}.")
        source = min(choices, key=lambda choice: len(_absent(choice, files)))
        absent = _absent(source, files)
        missing += absent
        if not absent and source.shape(files) != shape:
            names = next(iter(source.names()))
            wrong.append(f"{names} gives {source.shape(files)}, {name} is {shape}")
        wrong += [] if absent else _integers(source, files)
        plan[name] = source
    if missing:
        raise ValueError(f"The checkpoint lacks {_listed(sorted(set(missing)))}.")
    if wrong:
        raise ValueError(f"The checkpoint does not fit its config: {_listed(wrong, '; ')}.")
    return plan


def check_leftovers(plan: dict[str, Source], files: Checkpoint, config: ModelConfig) -> None:
    """Raise ValueError listing tensors that no parameter uses.

    A stored head beside a tied embedding is no leftover as long as both hold the same values. Nor
    are zero biases of GPTQ's and AWQ's matrices, which their tools write for maps without a bias.
    """
    used = {files[name].name for source in plan.values() for name in source.names()}
    unread = model_class(config.model_type).ignored_weights(config)
    if config.quantization is not None and config.quantization.kv_scales:
        unread = (*unread, *_KV_SCALES)
    ignored = re.compile("|".join((*IGNORED, *unread)))
    left = [name for name in files.tensors if name not in used and not ignored.fullmatch(name)]
    left = [name for name in left if not _is_empty_bias(name, files)]
    if config.tie_embeddings and HEAD in left:
        left.remove(HEAD)
        embedding = next(iter(plan["embed.weight"].names()))
        if not same_values(Tensor(HEAD), Tensor(embedding), files):
            raise ValueError(f"tie_word_embeddings is set, yet {HEAD} differs from {embedding}.")
    if left:
        raise ValueError(f"Tensors with no place in the model: {_listed(sorted(left))}.")


def _is_empty_bias(name: str, files: Checkpoint) -> bool:
    """Return whether a tensor is a bias of zeros beside a matrix of GPTQ or AWQ."""
    matrix = f"{name.removesuffix('bias')}weight"
    if not name.endswith(".bias") or matrix not in files:
        return False
    stored = files.tensors[name]
    return isinstance(files[matrix], GptqTensor) and not stored.whole().any()


def same_values(first: Source, second: Source, files: Checkpoint) -> bool:
    """Return whether two sources are equal, comparing a few rows at a time."""
    shape = first.shape(files)
    if shape != second.shape(files):
        return False
    for start in range(0, shape[0], 1024):
        rows = range(start, min(start + 1024, shape[0]))
        index = (rows, *(range(n) for n in shape[1:]))
        parts = [np.empty((len(rows), *shape[1:]), np.float32) for _ in range(2)]
        first.read(files, index, parts[0])
        second.read(files, index, parts[1])
        if not np.array_equal(parts[0], parts[1]):
            return False
    return True


def wanted_dtype(folder: Path, dtype: Any) -> jnp.dtype:
    """Return the dtype in which `load` makes a folder's model."""
    if dtype is not None:
        return supported_dtype(dtype)
    return checkpoint_dtype(read_config(folder), Checkpoint(folder))


def read_weight(
    param: Any, source: Source, files: Checkpoint, put: Callable[..., jax.Array], *, plain: bool
) -> Any:
    """Return one parameter by `put`: quantised where it may be and the files have it so."""
    axes, shape = param.get_metadata()["logical_axes"], tuple(param.shape)
    stored = source.shape(files)[0] if shape else 0
    form = source.form(files) if param.get_metadata().get("coded") and not plain else None
    if form is None:
        fill = functools.partial(source.read, files)
        return put("", shape, np.dtype(param.dtype), axes, stored, fill)
    arrays = {}
    for part, (part_shape, dtype) in form.parts(shape).items():
        fill = functools.partial(source.read_part, files, part)
        arrays[part] = put(part, part_shape, dtype, axes, stored, fill)
    return form.weight(arrays, shape, param.dtype)


def _putter(name: str, *, split: Split | None, place: Place | None) -> Callable[..., jax.Array]:
    """Return what makes the arrays of a parameter: `place`, or the devices of a split."""

    def put(part: str, shape: tuple[int, ...], dtype: Any, axes: Axes, stored: int, fill: Fill):
        if place is not None:
            filled = functools.partial(_fill_in_order, fill) if part == "codes" else fill
            return place(_label(name, part, shape), shape, np.dtype(dtype), filled)
        return _on_devices(shape, dtype, axes, split, stored, fill)

    return put


def _label(name: str, part: str, shape: tuple[int, ...]) -> str:
    """Return an array's name in an arena; it tells the order of codes, which importers trust."""
    if part == "codes" and (order := order_of(shape)) != ROWS:
        part = f"codes.{order}"
    return f"{name}#{part}" if part else name


def _fill_in_order(fill: Fill, index: Index, codes: np.ndarray) -> None:
    """Fill whole rows of 4-bit codes, in the order of this backend's kernels."""
    fill(index, codes)
    put_in_order(codes)


def _on_devices(
    shape: tuple[int, ...],
    dtype: np.dtype,
    axes: Axes,
    split: Split | None,
    stored: int,
    fill: Fill,
) -> jax.Array:
    """Return an array on its devices, each of which is given its own slice only.

    Only `stored` rows are there to fill: others are a padded vocabulary's, and zero.
    """
    sharding = weight_sharding(axes, shape, split)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        ranges = tuple(range(*s.indices(n)) for s, n in zip(index, shape, strict=True))
        out = _aligned(tuple(len(r) for r in ranges), dtype)
        kept = range(stored)[index[0]] if shape else range(0)
        if len(kept) < len(out):
            out[len(kept) :] = 0
            ranges = (kept, *ranges[1:])
        if len(kept):
            fill(ranges, out[: len(kept)])
        return out

    array = jax.make_array_from_callback(shape, sharding, read, dtype=dtype)
    return array.block_until_ready()  # where jax copies, the host's copy goes before the next


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _absent(source: Source, files: Checkpoint) -> list[str]:
    return [name for name in source.names() if name not in files]


def _straddles(source: Source, files: Checkpoint) -> bool:
    """Return whether a source has blocks of scales that continue in the next row."""
    return any(isinstance(files[name], StraddlingTensor) for name in source.names())


def _integers(source: Source, files: Checkpoint) -> list[str]:
    """Return what is wrong with tensors of integers; only a quantised form gives them a meaning."""
    stored = [t for t in (files[name] for name in source.names()) if t.dtype.kind in "iu"]
    if not stored or source.form(files) is not None:
        return []
    return [f"{t.name} holds {t.dtype}, not floats" for t in stored]


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


def _listed(names: list[str], between: str = ", ") -> str:
    more = len(names) - _MOST_NAMES
    return between.join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
