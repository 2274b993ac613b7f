"""The plan of a model's folder: by the command, and beside a server's own numbers."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from support.processes.server_process import ROOT

from bench.random_model import LlamaShape, llama_config
from lora_jax.adapters.slot_sizes import rows_per_adapter
from lora_jax.config import from_hf
from lora_jax.models.registry import model_class
from lora_jax.placement.picture import spell_bytes
from lora_jax.rank_rows import rows_nbytes
from serving import launch
from serving.api.device_sizes import for_device
from serving.engine.memory import memory_budget
from serving.engine.memory.jax_share import share_of
from serving.engine.memory.sizing import ASKED_LORA_SHARE, whole_adapters

LLAMA_8B = LlamaShape(128256, 4096, 14336, 32, 32, 8, 32768)


def test_devices_that_the_plan_takes_have_steps_as_if_asked_for(capsys, tmp_path):
    """A step over several devices has fewer tokens, so more KV pages are left."""
    fields = llama_config(LLAMA_8B) | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(100 * 10**9)  # without a byte on the disk
    taken = [str(tmp_path), "--plan", "{}"]
    assert launch.main(taken) == launch.main([*taken, "--tensor-parallel-size", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("devices        2 of 80 GB") == 2
    assert text[: len(text) // 2] == text[len(text) // 2 :]


def test_the_command_prints_the_plan_of_the_shipped_model(capsys):
    asked = json.dumps({"adapters": 200, "rank": 8, "device_bytes": 1e9, "guide": True})
    model = str(ROOT / "assets" / "tiny-moe")
    assert launch.main([model, "--plan", asked, "--max-loras", "20"]) == 0
    text = capsys.readouterr().out
    assert "20 adapters" in text
    assert "disk           200 adapters" in text
    assert "do not add up" in text
    # A GPU's kernels take outputs in steps of 64: such a server would not start.
    assert launch.main([model, "--plan", asked, "--tensor-parallel-size", "2"]) == 1
    other = str(ROOT / "assets" / "tiny-vl")
    assert launch.main([other, "--plan", asked, "--tensor-parallel-size", "2"]) == 0
    assert "devices        2 of 1 GB" in capsys.readouterr().out
    assert launch.main([model, "--plan", '{"modules": ["nope"]}']) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-loras", "20", "--max-lora-rank", "8"],
        ["--max-loras", "2000", "--max-lora-rank", "8"],  # rows of experts are the fewer
        ["--max-loras", "20", "--max-lora-rank", "16", "--lora-memory-bytes", "3000000"],
        ["--max-num-seqs", "2"],  # of whose longest sequences the pages are
        ["--gpu-memory-utilization", "1.0"],  # beside a step's own arrays
    ],
    ids=["all", "few rows", "bytes", "few pages", "step"],
)
def test_the_plan_has_the_server_s_own_numbers(flags, capsys, monkeypatch):
    """Slots, adapters in them and KV pages, of an engine on a device of so many bytes."""
    model, total = ROOT / "assets" / "tiny-moe", 600_000_000
    plan = json.dumps({"adapters": 1000, "rank": 8, "device_bytes": total})
    assert launch.main([str(model), "--plan", plan, *flags]) == 0
    text = capsys.readouterr().out
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    config = from_hf(json.loads((model / "config.json").read_text()))
    options = launch.read_options([str(model), *flags], {})
    limit = int(share_of(options.engine, config, total) * total)
    stats = {"bytes_limit": limit, "bytes_in_use": weights}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(memory_budget.jax, "local_devices", lambda: [device])
    engine = for_device(
        options.engine, on_cpu=False, device_bytes=limit, alone=True, has_experts=True
    )
    kind, dtype = model_class(config.model_type), jnp.dtype(jnp.bfloat16)
    given = engine, kind.catalogue(config), dtype
    size = memory_budget.size_kv_cache(engine, kind, config, *given[1:], share=ASKED_LORA_SHARE)
    options = {"share": ASKED_LORA_SHARE, "step": size.step_bytes}
    _, spec = memory_budget.make_allocator(engine, given[1], *given[1:], **options)
    held = whole_adapters(rows_per_adapter(given[1], 8), spec.rows)
    shown = f"{spell_bytes(rows_nbytes(spec.rows, 2))}: {min(held, engine.max_loras)} adapters"
    assert f"adapter slots  {shown}" in text
    assert f": {size.num_pages * size.page_size} tokens" in text


def test_modules_that_adapters_may_change_are_those_of_the_slots(capsys, tmp_path):
    model = str(ROOT / "assets" / "tiny-moe")
    (tmp_path / "adapter_config.json").write_text('{"target_modules": ["q_proj"]}')
    asked = [model, "--plan", json.dumps({"rank": 8, "device_bytes": 1e9}), "--max-loras", "20"]
    texts = []
    for more in ([], ["--lora-target-modules", "q_proj"], ["--lora-modules", f"a={tmp_path}"]):
        assert launch.main([*asked, *more]) == 0
        texts.append(capsys.readouterr().out.partition("adapter slots")[2].splitlines()[0])
    assert texts[0] != texts[1] == texts[2]
    assert launch.main([*asked, "--lora-target-modules", "query"]) == 1
