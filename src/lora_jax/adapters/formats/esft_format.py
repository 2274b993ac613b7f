"""Reading an ESFT folder into `ExpertWeights`, completely or not at all. No jax.

A folder holds expert_cfg.json and whole expert matrices `model.layers.{L}.mlp.experts.{E}.
{gate,up,down}_proj.weight` in one or more safetensors files, in the folder itself or, after
expert-parallel training, one part per rank in `last_checkpoint_ep{rank}` (deepseek-ai/ESFT,
esft.py and train_ep.py). Files of its first version leave out `model.`. The config and the tensors
must say the same, every matrix must be the base's size, or the read fails by name.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats import esft_config, safetensors_file
from lora_jax.adapters.formats.folder import AdapterFolder, pickle_hint
from lora_jax.adapters.formats.peft_names import find_target
from lora_jax.adapters.formats.safetensors_file import AdapterTensor, FileLimits
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import PROJECTIONS, AdapterReport, ExpertWeights, ModuleReport

CONFIG_FILE = "expert_cfg.json"
MODULES = tuple(f"experts.{name}" for name in PROJECTIONS)
_RANK_FOLDER = re.compile(r"last_checkpoint_ep\d+")
_MAX_CONFIG_BYTES = 1 << 20
_MORE_TENSORS = 64  # a header may name more tensors than are used; they are refused by name
_LISTED = 6
_THREADS = 8  # that look at all values
_Place = tuple[str, int, int]  # module, layer, expert


@dataclasses.dataclass(frozen=True)
class EsftReadLimits:
    """Limits of an adapter; more is a ValueError naming both numbers."""

    max_file_bytes: int = 4 << 30  # all files of the adapter together
    file: FileLimits = dataclasses.field(default_factory=FileLimits)


def read(
    path: Path,
    catalogue: LoraCatalogue,
    *,
    limits: EsftReadLimits | None = None,
    root: Path | None = None,
) -> ExpertWeights:
    """Return the adapter in the folder `path`, which with `root` must lie inside it.

    Raises FileNotFoundError when there is no such folder, and ValueError naming the file, key or
    tensor for everything else.
    """
    limits = limits or EsftReadLimits()
    folder = AdapterFolder(path, root)
    files = _weight_files(folder)
    with _naming(CONFIG_FILE):
        wanted = esft_config.parse(folder.read(CONFIG_FILE, _MAX_CONFIG_BYTES))
        _check_experts(wanted, catalogue)
    tensors = _read_files(folder, files, limits, catalogue)
    placed = _place(tensors, catalogue)
    _check_complete(placed, wanted)
    with ThreadPoolExecutor(_THREADS) as threads:
        arrays = threads.map(lambda key: _matrix(placed[key], catalogue, key[0]), placed)
        matrices = dict(zip(placed, arrays, strict=True))
    experts = {
        layer: {e: tuple(matrices[m, layer, e] for m in MODULES) for e in ids}
        for layer, ids in wanted.items()
    }
    return ExpertWeights(experts, _report(folder, wanted, tensors))


def check(folder: AdapterFolder) -> None:
    """Raise ValueError for the names of the folder's files and for its config; see `read`."""
    _weight_files(folder)
    with _naming(CONFIG_FILE):
        esft_config.parse(folder.read(CONFIG_FILE, _MAX_CONFIG_BYTES))


@contextlib.contextmanager
def _naming(file_name: str) -> Iterator[None]:
    """Put the file's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file_name}: {error}") from None


def _weight_files(folder: AdapterFolder) -> tuple[str, ...]:
    """Return the safetensors files, those of expert-parallel ranks with their folder's name."""
    names = folder.files()
    if CONFIG_FILE not in names:
        raise ValueError(f"no {CONFIG_FILE}.")
    if "adapter_config.json" in names:
        raise ValueError(f"both {CONFIG_FILE} and adapter_config.json; remove one of them.")
    files = [name for name in names if name.endswith(".safetensors")]
    for part in filter(_RANK_FOLDER.fullmatch, names):
        files += [f"{part}/{n}" for n in folder.files(part) if n.endswith(".safetensors")]
    if not files:
        pickles = folder.pickles()
        raise ValueError(f"no .safetensors file.{pickle_hint(pickles)}")
    return tuple(files)


def _check_experts(wanted: dict[int, tuple[int, ...]], catalogue: LoraCatalogue) -> None:
    """Raise ValueError unless the base has all these experts in these layers."""
    module = catalogue.modules.get(MODULES[0])
    if module is None:
        raise ValueError(f"the base model ({catalogue.model_type}) has no experts.")
    if not wanted:
        raise ValueError("the adapter replaces no expert.")
    layers = sorted(wanted.keys() - set(module.layers))
    if layers:
        raise ValueError(f"the base model has no experts in layers {_listed(layers)}.")
    for layer, ids in wanted.items():
        if ids[-1] >= module.num_experts:
            raise ValueError(
                f"experts of layer {layer} names expert {ids[-1]}, the base model has "
                f"{module.num_experts}."
            )


def _file_limits(limits: EsftReadLimits, catalogue: LoraCatalogue) -> FileLimits:
    """Return the limits of a file with every expert of the base, in float32."""
    tensors, values = 0, 0
    for name in MODULES:
        module = catalogue.modules[name]
        count = len(module.layers) * module.num_experts
        tensors += count
        values += count * module.d_in * module.d_out
    return limits.file.for_model(tensors + _MORE_TENSORS, 4 * values)


def _read_files(
    folder: AdapterFolder, files: tuple[str, ...], limits: EsftReadLimits, catalogue: LoraCatalogue
) -> dict[str, AdapterTensor]:
    """Return the tensors of all files under their new names; none may stand twice."""
    tensors: dict[str, AdapterTensor] = {}
    bounds = _file_limits(limits, catalogue)
    for file in files:
        room = max(0, limits.max_file_bytes - folder.num_bytes)
        in_file = safetensors_file.read_file(folder, file, room, bounds)
        for name, tensor in in_file.items():
            full = f"model.{name}" if name.startswith("layers.") else name
            if full in tensors:
                raise ValueError(f"{file}: {name} stands in another file or spelling, too.")
            tensors[full] = tensor
    return tensors


def _place(
    tensors: dict[str, AdapterTensor], catalogue: LoraCatalogue
) -> dict[_Place, AdapterTensor]:
    """Return every tensor by what it replaces; ValueError for one that is no expert's matrix."""
    placed: dict[_Place, AdapterTensor] = {}
    for name, tensor in tensors.items():
        target = find_target(name.removesuffix(".weight"), catalogue)
        if target is None or not name.endswith(".weight"):
            raise ValueError(f"{name}: the base model ({catalogue.model_type}) has no such tensor.")
        module = target.modules[0].name
        if module not in MODULES or target.expert is None:
            raise ValueError(f"{name} is no routed expert's matrix; only those can be replaced.")
        key = module, target.layer, target.expert
        if key in placed:
            raise ValueError(f"{name} and {placed[key].name} are the same matrix.")
        placed[key] = tensor
    return placed


def _check_complete(
    placed: dict[_Place, AdapterTensor], wanted: dict[int, tuple[int, ...]]
) -> None:
    """Raise ValueError unless the files hold the matrices of the named experts, and no others."""
    named = {(m, layer, e) for layer, ids in wanted.items() for e in ids for m in MODULES}
    missing = [f"layer {n}, expert {e}, {m[8:]}" for m, n, e in sorted(named - placed.keys())]
    if missing:
        raise ValueError(f"no file has {_listed(missing, '; ')}, which {CONFIG_FILE} names.")
    extra = [placed[key].name for key in sorted(placed.keys() - named)]
    if extra:
        raise ValueError(f"{CONFIG_FILE} does not name the expert of {_listed(extra)}.")


def _matrix(tensor: AdapterTensor, catalogue: LoraCatalogue, name: str) -> np.ndarray:
    """Return the values; ValueError for another shape than the base's or a value not finite."""
    module = catalogue.modules[name]
    if tensor.shape != (module.d_out, module.d_in):
        raise ValueError(
            f"{tensor.name} has shape {tensor.shape}; the base model wants "
            f"{(module.d_out, module.d_in)}."
        )
    return tensor.read()


def _listed(names: Iterable[object], between: str = ", ") -> str:
    shown = [str(name) for name in names]
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return between.join(shown[:_LISTED]) + more


def _report(
    folder: AdapterFolder,
    experts: dict[int, tuple[int, ...]],
    tensors: dict[str, AdapterTensor],
) -> AdapterReport:
    module = ModuleReport(layers=tuple(experts), ranks=(), scalings=())
    return AdapterReport(
        kind=AdapterKind.ESFT,
        folder=folder.name,
        digest=folder.digest(),
        files=dict(folder.hashes),
        file_bytes=folder.num_bytes,
        weight_bytes=sum(t.num_bytes for t in tensors.values()),
        modules=dict.fromkeys(MODULES, module),
        max_rank=0,
        num_tensors=len(tensors),
        base_model=None,
        peft_version=None,
        experts=experts,
    )
