"""Writes a quantised copy of a checkpoint: python -m lora_jax.quantize MODEL --format nf4 --out DIR

nf4 is bitsandbytes' with nested scales, fp8 has a scale per block of 128 x 128, and int4 is
compressed-tensors' pack-quantized. Linear maps of attention, MLPs and experts are quantised, each
rounded to the nearest; embeddings, head, norms, routers and vision towers stay as they are, and so
do maps whose columns do not divide into blocks. transformers and this server read the copy, but
transformers 5 reads no experts in NF4: it makes one tensor of them, which bitsandbytes does not
decode. Experts of a layer in one tensor are written with tensors of their own; transformers 5 does
not read those of Qwen3-VL-MoE.
--quant-lm-head quantises the head too, which answers pay for with errors in every logit.
"""

import argparse
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from lora_jax.config import ModelConfig
from lora_jax.models.checkpoint import INDEX, SINGLE, Checkpoint, checkpoint_files, read_header
from lora_jax.models.loader import plan_load, read_config
from lora_jax.models.quantised.encode import FORMATS, encoder, fits, needs
from lora_jax.models.registry import abstract, model_class, stored_shape
from lora_jax.models.sources import Source, Stack, Tensor

logger = logging.getLogger(__name__)
WEIGHT = ".weight"
HEAD = "lm_head"
_NAMED = 3  # maps in a line of the log


@dataclasses.dataclass(frozen=True)
class Expert:
    """One expert's map in a tensor of several: the name that the copy gives it, and its place."""

    name: str
    source: Source  # [experts, d_out, d_in]
    place: int

    def read(self, files: Checkpoint, dtype: np.dtype) -> np.ndarray:
        """Return the matrix [d_out, d_in]."""
        _, *shape = self.source.shape(files)
        matrix = np.empty((1, *shape), dtype)
        index = (range(self.place, self.place + 1), *(range(size) for size in shape))
        self.source.read(files, index, matrix)
        return matrix[0]


Fused = Mapping[str, Sequence[Expert]]  # by the tensor that holds them


def quantize(
    model: Path, format_name: str, out: Path, *, quant_lm_head: bool = False
) -> dict[str, Any]:
    """Write a quantised copy of a checkpoint folder; return the quantization_config it has.

    `quant_lm_head` quantises the head like any map.

    Raises:
        ValueError: the model is quantised already, is not supported, or stores experts as no
            library reads them quantised; the head is to be quantised and is tied to the embedding
            or too narrow; or `out` holds files.
    """
    config = read_config(model)
    if config.quantization is not None:
        raise ValueError(
            f"{model.name} is quantised already ({config.quantization.method}); give the original."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "holds files" if out.is_dir() else "is a file"
        raise ValueError(f"{out} {kind}; give a folder that does not exist.")
    files = Checkpoint(model)
    if quant_lm_head and config.tie_embeddings:
        raise ValueError(
            f"{model.name} has no head of its own (tie_word_embeddings), and the embedding stays "
            "in 16 bits. Leave out --quant-lm-head."
        )
    maps, fused = linear_maps(config, files, head=quant_lm_head)
    chosen = {name for name, shape in maps.items() if fits(format_name, shape)}
    if not chosen:
        raise ValueError(
            f"No map of {model.name} can be written in {format_name}, which needs "
            f"{needs(format_name)}."
        )
    heads = {name for name in maps if _is_head(name)}
    if quant_lm_head and not heads & chosen:
        raise ValueError(
            f"The head of {model.name} is {maps[next(iter(heads))]}, and {format_name} needs "
            f"{needs(format_name)}. Leave out --quant-lm-head."
        )
    encode, section = encoder(format_name, {maps[name][1] for name in chosen})
    said = section(_kept(files, maps, chosen))
    out.mkdir(parents=True, exist_ok=True)
    try:
        _write(model, out, _Encoder(files, fused, chosen, encode), said)
    except BaseException:
        shutil.rmtree(out)  # a second run would refuse a folder that holds files
        raise
    _log(format_name, chosen, sorted(maps.keys() - chosen))
    if fused and config.model_type == "qwen3_vl_moe":
        logger.info("Each expert has its own tensors now; transformers 5 does not read them.")
    return said


def _write(model: Path, out: Path, encoded: "_Encoder", section: dict[str, Any]) -> None:
    """Write the files of a copy."""
    placed: dict[str, str] = {}
    for file in checkpoint_files(model):
        tensors = dict(encoded.tensors(file))
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        (out / file.name).chmod(0o644)
        placed |= dict.fromkeys(tensors, file.name)
    if (model / INDEX).is_file():
        size = sum((out / name).stat().st_size for name in set(placed.values()))
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (out / INDEX).write_text(json.dumps(index, indent=1))
    _copy_others(model, out)
    raw = json.loads((model / "config.json").read_text())
    # What adapters call the model, which they go on naming (ModelConfig.original).
    added = {"_name_or_path": model.resolve().name, "quantization_config": section}
    (out / "config.json").write_text(json.dumps(raw | added, indent=2) + "\n")


def _log(format_name: str, chosen: set[str], left: list[str]) -> None:
    """Log what is quantised, what is not, and which library does not read that."""
    logger.info("%d maps are in %s.", len(chosen), format_name)
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        named = ", ".join(left[:_NAMED])
        logger.info("%d maps stay as they are, for their sizes: %s%s.", len(left), named, more)
    if format_name == "nf4" and any(".experts." in name for name in chosen):
        logger.info("transformers 5 reads no experts in NF4; int4 and fp8 it reads.")


def linear_maps(
    config: ModelConfig, files: Checkpoint, *, head: bool = False
) -> tuple[dict[str, tuple[int, ...]], Fused]:
    """Return the shapes of linear maps by their tensors' names, and those that are experts fused.

    Fused experts have the names that they have where each has a tensor of its own. The head is
    among the maps only with `head`.

    Raises:
        ValueError: experts are stored in a way that no library reads quantised.
    """
    _, state = abstract(config, "float32")
    params = {".".join(map(str, path)): param for path, param in nnx.to_flat_state(state)}
    shapes = {name: stored_shape(param, config) for name, param in params.items()}
    rules = model_class(config.model_type).weight_rules(config)
    plan = plan_load(rules, shapes, files)
    maps: dict[str, tuple[int, ...]] = {}
    fused: dict[str, list[Expert]] = {}
    for name, param in params.items():
        coded = param.get_metadata().get("coded")
        if not coded or name.startswith("tower" if head else ("tower", HEAD)):
            continue
        source = plan[name]
        if isinstance(source, Tensor | Stack) and all(n.endswith(WEIGHT) for n in source.names()):
            maps |= {files[n].name: files[n].shape for n in source.names()}
        elif ".experts." in name:
            stored = files[next(iter(source.names()))].name
            names = _names_apart(stored, [s for rule in rules for s in rule.match(name)])
            experts = [Expert(apart, source, place) for place, apart in enumerate(names)]
            fused.setdefault(stored, []).extend(experts)
            maps |= dict.fromkeys(names, source.shape(files)[1:])
    return maps, fused


def _names_apart(stored: str, choices: Sequence[Source]) -> list[str]:
    """Return the names of the experts of a fused tensor where each has its own, beside it."""
    site = stored.rpartition(".")[0]
    for choice in choices:
        if isinstance(choice, Stack) and choice.name.startswith(f"{site}."):
            return list(choice.names())
    raise ValueError(
        f"{stored} holds several experts or maps; quantised files name each expert's maps. Write "
        "the checkpoint with one tensor for each."
    )


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Tensors of the copy, of those of a checkpoint."""

    files: Checkpoint
    fused: Fused
    chosen: set[str]
    encode: Callable[[np.ndarray], Mapping[str, np.ndarray]]

    def tensors(self, file: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors that take the place of those of a file, in order."""
        for name, stored in read_header(file).items():
            if name in self.chosen:
                yield from self._encoded(name, stored.whole().astype(np.float32))
            elif name not in self.fused:
                yield name, stored.whole()
            for expert in self.fused.get(name, ()):
                if expert.name in self.chosen:
                    wide = expert.read(self.files, np.dtype(np.float32))
                    yield from self._encoded(expert.name, wide)
                else:
                    yield expert.name, expert.read(self.files, stored.dtype)

    def _encoded(self, name: str, wide: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if not np.isfinite(wide).all():
            raise ValueError(f"{name} holds values that are not finite.")
        path = name.removesuffix("weight")
        for part, tensor in self.encode(wide).items():
            yield f"{path}{part}", np.ascontiguousarray(tensor)


def _kept(files: Checkpoint, maps: Mapping[str, Any], chosen: set[str]) -> list[str]:
    """Return the paths of matrices that stay as they are, the head's too where it is tied."""
    matrices = {name for name, stored in files.tensors.items() if len(stored.shape) == 2}
    tied = () if any(map(_is_head, chosen)) else (HEAD,)
    return sorted({*tied, *(n.removesuffix(WEIGHT) for n in (matrices | maps.keys()) - chosen)})


def _is_head(name: str) -> bool:
    """Return whether a tensor is the head's: some files put a prefix before its name."""
    return name.removesuffix(WEIGHT).rsplit(".", 1)[-1] == HEAD


def _copy_others(model: Path, out: Path) -> None:
    """Copy the files beside the weights: tokenizer, chat template, licence."""
    for file in sorted(model.iterdir()):
        weights = file.suffix == ".safetensors" or file.name in (INDEX, SINGLE, "config.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, out / file.name)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.quantize", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, help="checkpoint folder in 16 or 32 bits")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--quant-lm-head", action="store_true", help="quantise the head too")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        quantize(args.model, args.format, args.out, quant_lm_head=args.quant_lm_head)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
