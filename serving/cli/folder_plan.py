"""The plan of a deployment (see plan) for a model's folder and an engine's config."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp

from lora_jax import strict_json
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.config import ModelConfig, from_hf
from lora_jax.config.split_sizes import attention_output, check_divides, expert_split
from lora_jax.kv_cache import KVShape
from lora_jax.models import model_class
from lora_jax.sharding import UNIT
from serving.api.config import EngineConfig
from serving.api.device_sizes import for_device
from serving.cli.plan import DeviceSizes, ModelSizes, plan_text, read_request
from serving.engine.memory.jax_share import share_of
from serving.engine.memory.step_arrays import step_bytes
from serving.engine.memory.storage import kv_dtype, lora_dtype
from serving.engine.parts.target_parts import open_modules


def plan_of_folder(engine: EngineConfig, text: str, adapters: Iterable[str] = ()) -> str:
    """Return the plan that the JSON `text` asks for, for people; no weights are read.

    `adapters` are the folders of those that a server would load, by which modules may be chosen.
    Raises ValueError for a wrong request and for a model that no device has room for, OSError for
    a folder without config.json.
    """
    request, folder = read_request(text), Path(engine.model)
    config = from_hf(strict_json.loads((folder / "config.json").read_text()))
    model = model_class(config.model_type)
    catalogue = model.catalogue(config)
    if engine.lora_target_modules is not None:
        kept = open_modules(catalogue, engine.lora_target_modules, adapters)
        catalogue = catalogue.only(kept) if kept else catalogue
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    wanted = engine.dtype if engine.dtype != "auto" else config.dtype
    dtype = jnp.dtype(wanted or "bfloat16")
    split = _Split(
        engine,
        config,
        catalogue,
        model.kv_shape(config),
        dtype,
        int(request.device_bytes),
    )
    sizes = ModelSizes(
        weights,
        split.kv_bytes_per_token(1),
        lora_dtype(engine, dtype).itemsize,
        config.max_positions,
        split.share,
        split.step_bytes,
    )
    one = split.engine_of(engine.tensor_parallel_size)
    return plan_text(request, one, split.catalogue, sizes, split.device_sizes)


@dataclasses.dataclass(frozen=True)
class _Split:
    """Sizes of a model that is split over some number of devices, each of `device_bytes`."""

    engine: EngineConfig
    config: ModelConfig
    catalogue: LoraCatalogue
    kv: KVShape
    dtype: jnp.dtype
    device_bytes: int

    def engine_of(self, devices: int) -> EngineConfig:
        """Return the engine's config with the sizes of so many GPUs."""
        return for_device(
            self._over(devices),
            on_cpu=False,
            device_bytes=int(self.share(devices) * self.device_bytes),
            alone=True,
            has_experts=self.config.moe is not None,
        )

    def share(self, devices: int) -> float:
        """Return the fraction of each device's memory that is jax's."""
        return share_of(self._over(devices), self.config, self.device_bytes)

    def step_bytes(self, context: int, devices: int) -> int:
        """Return the bytes on each device of a step's own arrays, for sequences of `context`."""
        return step_bytes(
            self.engine_of(devices),
            self.config,
            self.kv.local(devices),
            self.dtype,
            context,
            devices,
            traced=False,
        )

    def kv_bytes_per_token(self, devices: int) -> int:
        """Return the bytes of one token's KV on each device."""
        return self.kv.local(devices).bytes_per_token(kv_dtype(self.engine, self.dtype))

    def device_sizes(self, devices: int) -> DeviceSizes:
        """Return what each device has. Raises ValueError if sizes do not divide."""
        experts = expert_split(self.config, devices, self.engine.enable_expert_parallel)
        check_divides(self.config, devices, experts, UNIT)
        whole = attention_output(self.config) == "whole"
        widths = LocalWidths(devices, experts == "ep", devices * UNIT, whole)
        return DeviceSizes(widths.catalogue(self.catalogue), self.kv_bytes_per_token(devices))

    def _over(self, devices: int) -> EngineConfig:
        return dataclasses.replace(self.engine, tensor_parallel_size=devices)
