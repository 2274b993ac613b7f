"""The frozen base of a LoRA training: as its files have it, or quantised for it (QLoRA)."""

import pathlib
import tempfile

from lora_jax.adapters.catalogue import UNQUANTISED
from lora_jax.config import ModelConfig
from lora_jax.models import load
from lora_jax.models.loader import read_config
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.quantize import quantize


def load_base(
    folder: pathlib.Path, quantization: str | None, scratch: pathlib.Path
) -> tuple[AbstractCausalLM, ModelConfig, str]:
    """Return a base that computes in float32, its config, and the format of its weights.

    Quantised maps stay so in memory. With `quantization` a base in 16 bits is rounded to that
    format; its copy lies in `scratch` while it is read.

    Raises:
        ValueError: the files are quantised in another format than asked for.
    """
    stored = read_config(folder).quantization
    if stored is None and quantization is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch, prefix=".base-") as room:
            copy = pathlib.Path(room) / folder.resolve().name
            quantize(folder, quantization, copy)
            model, config = load(copy, dtype="float32")
        return model, config, quantization
    if stored is not None and quantization not in (None, stored.format):
        raise ValueError(
            f"{folder.name} is in {stored.format}; --quantization {quantization} needs the "
            f"original in 16 bits. Leave the flag out to train over {stored.format}."
        )
    model, config = load(folder, dtype="float32")
    return model, config, UNQUANTISED if stored is None else stored.format
