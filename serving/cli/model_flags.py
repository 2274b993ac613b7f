"""Flags against the model's config.json, before jax is imported or a process started. No jax."""

import dataclasses
from pathlib import Path

from lora_jax import strict_json
from lora_jax.config import ModelConfig, from_hf
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.engine.parts.pairs import Beside, check_pairs, check_tenants
from serving.loading.esft_checks import check_esft


def check_model_flags(options: Options) -> None:
    """Raise ValueError for flags that the model, or another flag, does not go with.

    An engine checks the same at its start, and says what is wrong with a config.json.
    """
    model = _config_of(Path(options.engine.model))
    if model is None:
        return
    cluster = options.cluster
    has_functions = options.functions.functions is not None
    beside = Beside(
        lora_server=bool(cluster.lora_server),
        several_hosts=cluster.splits_model,
        shared_backbone=has_functions,
    )
    for engine in engines_of(options.engine):
        check_pairs(engine, model, beside)
    if not cluster.follows:  # rank 0 alone reads adapters
        check_esft(options.engine, model, {a.name: a.path for a in options.adapters})
    if has_functions and options.functions.functions_isolation == "server":
        check_tenants(options.engine)
        try:
            alone = dataclasses.replace(beside, lora_server=True, tenants=True)
            check_pairs(options.engine, model, alone)
        except ValueError as error:
            raise ValueError(
                "With --functions-isolation server an engine has no adapters, as beside a LoRA "
                f"Server: {error} Or choose --functions-isolation process."
            ) from None


def engines_of(engine: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """Return the configs of the last instance, which has --merge-adapter, and of all others."""
    if engine.merge_adapter is None:
        return engine, engine
    last = dataclasses.replace(engine, lora_merge="off")
    return last, dataclasses.replace(engine, merge_adapter=None)


def _config_of(folder: Path) -> ModelConfig | None:
    """Return the config of a model, None for one that is not served."""
    try:
        return from_hf(strict_json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError):
        return None
