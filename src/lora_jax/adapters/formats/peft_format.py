"""Reading a PEFT LoRA folder into `AdapterWeights`, completely or not at all. No jax.

The tensors are the truth about what was trained; the config gives rank, alpha and variants. Every
tensor is placed, every A has its B, every shape is the base model's, or the read fails by name.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lora_jax.adapters.catalogue import UNQUANTISED, LoraCatalogue
from lora_jax.adapters.formats import (
    head_format,
    peft_config,
    peft_experts,
    peft_gains,
    peft_vocabulary,
    safetensors_file,
)
from lora_jax.adapters.formats.file_layouts import FileLayouts, LayoutSearch
from lora_jax.adapters.formats.folder import AdapterFolder, pickle_hint
from lora_jax.adapters.formats.peft_config import PeftConfig
from lora_jax.adapters.formats.peft_experts import Fused
from lora_jax.adapters.formats.peft_names import KV_B, LoraPair, Target, find_target, pair_up
from lora_jax.adapters.formats.safetensors_file import FileLimits, WholeFile, naming
from lora_jax.adapters.formats.tokenizer_files import read_added
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.task_head import SCORE, TaskHead
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ModuleReport, SiteWeights

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MOST_BLANK = 1 << 30  # bytes of a file for which zeros may stand
BASE_QUANTIZATION = "base_quantization"  # in the metadata of WEIGHTS_FILE
_PLAIN = "16 or 32 bits"
_MAX_CONFIG_BYTES = 1 << 20
_MORE_TENSORS = 64  # a header may name more tensors than are used; they are refused by name
_SITES = dict[tuple[str, int], SiteWeights]


@dataclasses.dataclass(frozen=True)
class PeftReadLimits:
    """Limits of an adapter; more is a ValueError naming both numbers."""

    max_file_bytes: int = 4 << 30
    max_rank: int = 512
    file: FileLimits = dataclasses.field(default_factory=FileLimits)


def read(path: Path, *given: Any, root: Path | None = None, **more: Any) -> AdapterWeights:
    """Return the adapter in the folder `path`, which with `root` must lie inside it.

    Raises FileNotFoundError when there is no such folder, and else as `read_folder`, which gets
    the other arguments.
    """
    return read_folder(AdapterFolder(path, root), *given, **more)


def read_folder(
    folder: AdapterFolder,
    catalogue: LoraCatalogue,
    *,
    base_names: tuple[str, ...] = (),
    limits: PeftReadLimits | None = None,
    layouts: FileLayouts | None = None,
) -> AdapterWeights:
    """Return the adapter in a folder of which no file was read; its matrices lie in one block.

    Raises ValueError naming the file, key or tensor. `base_names` are the names of the served base
    model: an adapter that names another one, or was trained over its weights in another format, is
    read with a warning, since its shapes fit. `layouts` are those known of earlier files: they
    save time and change no result.
    """
    limits = limits or PeftReadLimits()
    has_head = head_format.HEAD_FILE in check_files(folder)
    head = head_format.read_head(folder) if has_head else None
    config = read_config(folder, has_head=has_head, brings=True)
    search = None
    if layouts is not None and not has_head:
        search = LayoutSearch(layouts, catalogue, f"{config.meaning} {base_names} {limits}")
    file = safetensors_file.read_whole(
        folder, WEIGHTS_FILE, limits.max_file_bytes, _file_limits(limits, catalogue), search
    )
    if search is not None and (known := search.weights(file, folder)) is not None:
        return known
    found = _read(file, config, catalogue, folder, base_names, limits, head)
    packed = found.in_one_block()
    if search is not None and not (found.gains or found.report.brings):
        search.learn(file, found, packed)
    return packed


def check_shapes(
    path: Path,
    catalogue: LoraCatalogue,
    *,
    base_names: tuple[str, ...] = (),
    limits: PeftReadLimits | None = None,
) -> Set[tuple[str, int]]:
    """Return the modules, with their layers, that an adapter changes, or raise what `read` raises
    for the names, dtypes and shapes of its tensors.

    Zeros stand for the weights, of which none is read. A task head, and an adapter that has more
    than LoRA, is left to `read`, which looks at their values, and so is a file of which copies
    would take much memory: of these nothing is said. OSError for a file that cannot be read.
    """
    limits, folder = limits or PeftReadLimits(), AdapterFolder(path)
    if head_format.HEAD_FILE in check_files(folder):
        return frozenset()
    config = read_config(folder, brings=True)
    if config.has_gains or any(peft_vocabulary.needs(config)):
        return frozenset()
    most = _file_limits(limits, catalogue)
    file = safetensors_file.blank_file(path / WEIGHTS_FILE, limits.max_file_bytes, most)
    if len(file.data) > _MOST_BLANK:
        return frozenset()
    return _read(file, config, catalogue, folder, base_names, limits, None).sites.keys()


def _read(
    file: WholeFile,
    config: PeftConfig,
    catalogue: LoraCatalogue,
    folder: AdapterFolder,
    base_names: tuple[str, ...],
    limits: PeftReadLimits,
    head: TaskHead | None,
) -> AdapterWeights:
    """Return the adapter of a file, with matrices that may be views of it."""
    tensors, metadata = safetensors_file.tensors_of(file, WEIGHTS_FILE)
    warnings, num_tensors, sites = _warnings(config, base_names), len(tensors), {}
    if head is not None and warnings:
        # LoRA's shapes say that it fits. A head would tell its labels of states it does not know.
        raise ValueError(
            f"{CONFIG_FILE}: the task head was {warnings[0]} If both have the same weights, start "
            "the server with that name (--served-model-name)."
        )
    with _telling(warnings), naming(WEIGHTS_FILE):
        if head is not None:
            sites[SCORE, 0] = head_format.take_site(tensors, head, catalogue)
        of_outputs = peft_gains.take_tensors(tensors, config)
        rows = peft_vocabulary.take_rows(tensors, config, catalogue)
        if head is None or tensors:  # a head alone has no LoRA
            pairs = pair_up(tensors)
            sites |= read_sites(pairs, config, catalogue)
        else:
            pairs = {}
        check_ranks(sites, limits.max_rank)
        found = peft_gains.raw_gains(of_outputs, pairs, config, sites, catalogue)
        peft_vocabulary.check_alone(rows, sites.keys() | found.keys())
    added = read_added(folder) if rows.sites else ()
    warnings += _precision_warnings(metadata, catalogue)
    report = make_report(folder, sites, config, num_tensors, warnings, head)
    report = dataclasses.replace(
        report,
        brings=peft_gains.words_of(found) + rows.words,
        weight_bytes=report.weight_bytes + rows.num_bytes,
        added_tokens=added,
    )
    return AdapterWeights(sites | rows.sites, report, gains=found, token_ids=rows.token_ids)


def _file_limits(limits: PeftReadLimits, catalogue: LoraCatalogue) -> FileLimits:
    """Return the limits of a file with the highest rank on every module, in float32.

    PEFT may add a copy of the base's head, see `peft_names`.
    """
    tensors, values = 0, head_format.most_values(catalogue)
    for module in catalogue.modules.values():
        if module.name == SCORE:
            continue
        count = len(module.layers) * max(1, module.num_experts)
        rank = module.most_rank or limits.max_rank
        tensors += 2 * count
        values += count * rank * (module.d_in + module.d_out)
    head = catalogue.modules.get("lm_head")
    values += head.d_out * (head.d_in + 1) if head else 0
    return limits.file.for_model(tensors + _MORE_TENSORS, 4 * values)


def read_config(
    folder: AdapterFolder, *, has_head: bool = False, brings: bool = False
) -> peft_config.PeftConfig:
    """Return the folder's config, see peft_config.parse. ValueError names the file and the key."""
    with naming(CONFIG_FILE):
        data = folder.read(CONFIG_FILE, _MAX_CONFIG_BYTES)
        return peft_config.parse(data, has_head=has_head, brings=brings)


def check_files(folder: AdapterFolder) -> tuple[str, ...]:
    """Return the names of the folder's files.

    Raises ValueError unless the two files are there, and no third that would be lost.
    """
    names = folder.files()
    if CONFIG_FILE not in names:
        raise ValueError(f"no {CONFIG_FILE}.")
    if WEIGHTS_FILE not in names:
        pickles = [name for name in folder.pickles() if name.startswith("adapter_model")]
        raise ValueError(f"no {WEIGHTS_FILE}.{pickle_hint(pickles)}")
    others = [n for n in names if ".safetensors" in n and n != WEIGHTS_FILE]
    if others:
        raise ValueError(f"{', '.join(others)} would be lost; only {WEIGHTS_FILE} is read.")
    return names


def read_sites(pairs: dict[str, LoraPair], config: PeftConfig, catalogue: LoraCatalogue) -> _SITES:
    """Return every site the pairs change; ValueError when one fits nowhere or two collide."""
    if not pairs:
        raise ValueError("no LoRA matrices.")
    config.check_size(len(pairs))
    sites: _SITES = {}
    fused: dict[str, tuple[Fused, dict[int, LoraPair]]] = {}
    experts: dict[tuple[str, int], dict[int, SiteWeights]] = {}
    for path, pair in pairs.items():
        container = peft_experts.container_of(path)
        stack = peft_experts.find_fused(container[0], catalogue) if container else None
        if container and stack:
            fused.setdefault(stack.path, (stack, {}))[1][container[1]] = pair
            continue
        target = find_target(path, catalogue) or peft_experts.find_shared(path, catalogue)
        if target is None:
            kind = catalogue.model_type
            raise ValueError(f"{pair.a.name}: the base model ({kind}) has no module {path}.")
        if target.is_all_experts:
            _add(sites, peft_experts.read_shared(pair, target, config), path)
        elif target.expert is None:
            _add(sites, _read_plain(pair, target, config, catalogue), path)
        else:
            for (name, layer), site in _read_plain(pair, target, config, catalogue).items():
                _add(experts.setdefault((name, layer), {}), {target.expert: site}, path)
    for stack, members in fused.values():
        _add(sites, peft_experts.read_fused(stack, members, config, catalogue), stack.path)
    for (name, layer), members in experts.items():
        site = peft_experts.stack_experts(catalogue.modules[name], members)
        _add(sites, {(name, layer): site}, f"experts of {name} in layer {layer}")
    return sites


def _add[K](sites: dict[K, SiteWeights], new: dict[K, SiteWeights], path: str) -> None:
    for key, site in new.items():
        if key in sites:
            raise ValueError(f"{path}: the file has LoRA for it under two names.")
        sites[key] = site


def _read_plain(
    pair: LoraPair, target: Target, config: PeftConfig, catalogue: LoraCatalogue
) -> _SITES:
    """Return the sites of one A [r, d_in], B [d_out, r]; modules fused in B share A."""
    heads = catalogue.kv_b_heads if target.is_kv_b else None
    if heads:
        d_in, d_out = target.modules[0].d_out, heads[0] * (heads[1] + heads[2])
    else:
        d_in, d_out = target.modules[0].d_in, sum(module.d_out for module in target.modules)
    rank = _check_shapes(pair, d_in, d_out)
    key = f"{pair.path}.weight" if config.targets(f"{pair.path}.weight") else pair.path
    if rank != config.rank_of(key):
        raise ValueError(f"{pair.a.name} has rank {rank}, the config says {config.rank_of(key)}.")
    scaling = config.scaling_of(key, rank)
    a, b = pair.a.read()[None], pair.b.read()
    if heads:
        return _absorb(a, b, heads, target.layer, scaling)
    sites, row = {}, 0
    for module in target.modules:
        part = b[row : row + module.d_out].T[None]
        sites[module.name, target.layer] = SiteWeights(a, part, scaling)
        row += module.d_out
    return sites


def _check_shapes(pair: LoraPair, d_in: int, d_out: int) -> int:
    """Return the rank; ValueError unless A is [rank, d_in] and B is [d_out, rank]."""
    a, b = pair.a.shape, pair.b.shape
    if len(a) != 2 or a[1] != d_in:
        raise ValueError(f"{pair.a.name} has shape {a}; the base model wants (rank, {d_in}).")
    if b != (d_out, a[0]):
        raise ValueError(f"{pair.b.name} has shape {b}; the base model wants {(d_out, a[0])}.")
    return a[0]


def _absorb(
    a: np.ndarray, b: np.ndarray, heads: tuple[int, int, int], layer: int, scaling: float
) -> _SITES:
    """Return LoRA of MLA's kv_b_proj as the step applies it: per head, to q and to the latent.

    B's rows of a head are [nope | v]. k_nope = B_k A c, so that q . k_nope = (q B_k) A . c: the
    site "k" maps q [nope] over the rows of B_k to the latent through A; "v" maps the attended
    latent through A to the rows of B_v. Both hold the same A.
    """
    count, nope, v_dim = heads
    by_head = b.reshape(count, nope + v_dim, -1).transpose(0, 2, 1)
    k_rows, v_rows = by_head[..., :nope], by_head[..., nope:]
    return {
        (KV_B[0], layer): SiteWeights(k_rows, a, scaling),
        (KV_B[1], layer): SiteWeights(a, v_rows, scaling),
    }


def check_ranks(sites: _SITES, max_rank: int) -> None:
    """Raise ValueError naming the first site whose rank is above the limit."""
    for (name, layer), site in sites.items():
        if site.rank > max_rank and name != SCORE:
            raise ValueError(
                f"rank {site.rank} of {name} in layer {layer} is above the limit of {max_rank}; "
                "max_lora_rank sets it."
            )


def _warnings(config: PeftConfig, base_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a warning when the adapter names another base model, by the last part of its path."""
    if not config.base_model or not base_names:
        return ()
    named, *served = (PurePosixPath(name).name for name in (config.base_model, *base_names))
    if named in served:
        return ()
    return (f"made for the base model {config.base_model!r}, served on {base_names[0]!r}.",)


@contextlib.contextmanager
def _telling(warnings: tuple[str, ...]) -> Iterator[None]:
    """Add to a refusal that the adapter names another base model: that is the likely reason."""
    try:
        yield
    except ValueError as error:
        more = f" The adapter was {warnings[0]}" if warnings else ""
        raise ValueError(f"{error}{more}") from None


def _precision_warnings(metadata: dict[str, str], catalogue: LoraCatalogue) -> tuple[str, ...]:
    """Return a warning when the file says that the base was quantised in another way."""
    trained, served = metadata.get(BASE_QUANTIZATION), catalogue.quantization
    if trained is None or served is None or trained == served:
        return ()
    trained = trained if trained.isalnum() and len(trained) < 20 else "an unknown format"
    names = (_PLAIN if name == UNQUANTISED else name for name in (trained, served))
    return ("trained over a base in {}, served over one in {}: answers differ.".format(*names),)


def make_report(
    folder: AdapterFolder,
    sites: _SITES,
    config: PeftConfig,
    num_tensors: int,
    warnings: tuple[str, ...],
    head: TaskHead | None = None,
) -> AdapterReport:
    """Return what is told of an adapter whose sites these are."""
    by_module: dict[str, list[tuple[int, SiteWeights]]] = {}
    for (name, layer), site in sorted(sites.items(), key=lambda item: item[0]):
        by_module.setdefault(name, []).append((layer, site))
    distinct = {id(m): m.nbytes for site in sites.values() for m in (site.a, site.b)}
    return AdapterReport(
        kind=AdapterKind.LORA,
        folder=folder.name,
        digest=folder.digest(),
        files=dict(folder.hashes),
        file_bytes=folder.num_bytes,
        weight_bytes=sum(distinct.values()),
        modules={name: _module_report(of_module) for name, of_module in by_module.items()},
        max_rank=max((s.rank for (name, _), s in sites.items() if name != SCORE), default=0),
        num_tensors=num_tensors,
        base_model=config.base_model,
        peft_version=config.peft_version,
        warnings=warnings,
        head=head,
    )


def _module_report(sites: list[tuple[int, SiteWeights]]) -> ModuleReport:
    return ModuleReport(
        layers=tuple(layer for layer, _ in sites),
        ranks=tuple(sorted({site.rank for _, site in sites})),
        scalings=tuple(sorted({site.scaling for _, site in sites})),
    )
