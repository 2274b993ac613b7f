"""The plan of a deployment: bytes, tiers, hits and cost of a model at hand."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from support.processes.server_process import ROOT

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.slot_sizes import rows_per_adapter
from lora_jax.config import from_hf
from lora_jax.models.registry import model_class
from lora_jax.placement.picture import spell_bytes
from lora_jax.rank_rows import rows_nbytes
from serving import launch
from serving.api.config import EngineConfig
from serving.api.device_sizes import for_device
from serving.cli.guide import adapter_bytes, attention_of
from serving.cli.plan import DeviceSizes, ModelSizes, PlanRequest, plan_text, read_request
from serving.engine.memory import memory_budget
from serving.engine.memory.jax_share import share_of
from serving.engine.memory.sizing import ASKED_LORA_SHARE, whole_adapters

LAYERS = tuple(range(80))
SHAPES = {"q_proj": 8192, "k_proj": 1024, "v_proj": 1024, "o_proj": 8192}


@pytest.fixture
def llama_70b():
    modules = {name: LoraModule(name, 8192, wide, LAYERS) for name, wide in SHAPES.items()}
    return LoraCatalogue("llama", 80, modules, ())


def model_sizes(weights, per_token, itemsize, step=0):
    return ModelSizes(weights, per_token, itemsize, 1 << 17, lambda devices: 1.0, lambda *_: step)


KV = 80 * 2 * 8 * 128 * 2  # bytes of a token


def halves(catalogue):
    """What two devices have: inputs whole, outputs and KV heads in halves."""

    def on_each(size):
        assert size == 2
        modules = {
            name: dataclasses.replace(module, d_out=module.d_out // 2)
            for name, module in catalogue.modules.items()
        }
        return DeviceSizes(dataclasses.replace(catalogue, modules=modules), KV // 2)

    return on_each


def test_the_plan_counts_devices_tiers_and_money(llama_70b):
    flags = {"max_loras": 30, "max_lora_rank": 16, "max_total_adapter_bytes": 1 << 36}
    engine = EngineConfig(model="m", **flags)
    sizes, on_each = model_sizes(141_000_000_000, KV, 2), halves(llama_70b)
    text = plan_text(PlanRequest(device_bytes=141e9), engine, llama_70b, sizes, on_each)
    assert "devices        2 of 141 GB" in text
    # A lies whole on both devices: 80 layers, 30 adapters, rank 16, in 2 bytes.
    held = 80 * 30 * 16 * 2 * (2 * 4 * 8192 + 2 * 8192 + 2 * 1024)
    assert f"adapter slots  {held / 1e9:.3g} GB: 30 adapters" in text
    left = int(2 * 0.9 * 141e9) - 141_000_000_000 - held
    tokens = left // KV // 16 * 16  # whole pages
    assert f"KV cache       {tokens * KV / 1e9:.3g} GB: {tokens} tokens" in text
    assert "2,920 a month" in text
    assert "host           524 adapters" in text
    assert "the 30 most popular get 53.4%" in text
    assert "rank 256" in text
    few = dataclasses.replace(engine, max_cpu_loras=10)  # what leaves the host leaves the device
    text = plan_text(PlanRequest(device_bytes=141e9), few, llama_70b, sizes, on_each)
    assert ", host 0.0%, disk" in text
    assert "the 10 most popular get" in text
    small = PlanRequest(adapters=10, zipf=0.0, device_bytes=141e9)
    text = plan_text(small, engine, llama_70b, sizes, on_each)
    assert "device 100.0%, host 0.0%, disk 0.0%" in text


def test_a_steps_own_arrays_are_left_free_for(llama_70b):
    engine = EngineConfig(model="m", max_loras=4, gpu_memory_utilization=1.0)
    on_each, request = halves(llama_70b), PlanRequest(device_bytes=80e9)

    def tokens(step, **changes):
        config = dataclasses.replace(engine, **changes)
        sizes = model_sizes(120_000_000_000, KV, 2, step)
        text = plan_text(request, config, llama_70b, sizes, on_each)
        shown = f"step           {spell_bytes(2 * step)} for"
        assert (shown in text) == ("kv_cache_memory_bytes" not in changes)
        return int(text.partition("KV cache")[2].split()[2])

    most = tokens(0)
    assert most - 16 <= tokens(2 * 10**9) + 2 * 10**9 * 2 // KV <= most + 16
    given = {"kv_cache_memory_bytes": 1 << 30}
    assert tokens(10**9, **given) == tokens(0, **given)
    engine = dataclasses.replace(engine, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"and a step's own arrays \(\d+ bytes\) leave no room"):
        tokens(20 * 10**9)
    full = {"max_loras": 1, "max_lora_rank": 1024, "lora_memory_bytes": 10 * 10**9}
    with pytest.raises(ValueError, match=r"2 devices .* 11 GB for a step's own arrays and adapter"):
        tokens(11 * 10**9, **full)


def fields_of(kind, layers, hidden, kv_heads, vocab, **more):
    name = {"llama": "Llama", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}[kind]
    return {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        **more,
    }


QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Values of one rank in a layer, summed by hand: attention, the rest; bytes of a token in KV pages.
REAL = {
    "Llama-3.1-8B": (
        fields_of("llama", 32, 4096, 8, 128256, intermediate_size=14336),
        (4096 + 4096) * 2 + (4096 + 1024) * 2,
        3 * (4096 + 14336),
        131072,
    ),
    "Qwen3-30B-A3B": (
        fields_of("qwen3_moe", 48, 2048, 4, 151936, intermediate_size=6144, **QWEN),
        (2048 + 4096) * 2 + (2048 + 512) * 2,
        128 * 3 * (2048 + 768) + (2048 + 128),  # experts, router
        98304,
    ),
    "Mixtral-8x7B": (
        fields_of(
            *("mixtral", 32, 4096, 8, 32000),
            intermediate_size=14336,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        (4096 + 4096) * 2 + (4096 + 1024) * 2,
        8 * 3 * (4096 + 14336) + (4096 + 8),
        131072,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_bytes_of_real_models_are_those_counted_by_hand(name):
    fields, attention, rest, per_token = REAL[name]
    config = from_hf(fields)
    model = model_class(config.model_type)
    catalogue, layers = model.catalogue(config), fields["num_hidden_layers"]
    head = fields["hidden_size"] + fields["vocab_size"]
    for rank in (1, 16, 64):
        some = adapter_bytes(catalogue, rank, 2, attention_of(catalogue))
        assert some == rank * layers * attention * 2
        whole = adapter_bytes(catalogue, rank, 2)
        assert whole == rank * (layers * (attention + rest) + head) * 2
    assert model.kv_shape(config).bytes_per_token(jnp.dtype(jnp.bfloat16)) == per_token


def test_the_lines_of_a_real_model_are_those_counted_by_hand():
    fields, attention, rest, per_token = REAL["Llama-3.1-8B"]
    config = from_hf(fields)
    catalogue = model_class(config.model_type).catalogue(config)
    weights, one = 16_060_522_496, 16 * (32 * (attention + rest) + 4096 + 128256) * 2
    flags = {"max_loras": 30, "max_lora_rank": 16, "max_total_adapter_bytes": 10**10}
    sizes = model_sizes(weights, per_token, 2, step=10**9)
    text = plan_text(PlanRequest(), EngineConfig("m", **flags), catalogue, sizes, None)
    tokens = (int(0.9 * 80e9) - weights - 30 * one) // (16 * per_token) * 16
    host = 10**10 // one
    assert text.splitlines()[5:-2] == [
        f"one adapter    rank 16 on all modules: {one / 1e6:.1f} MB; {weights // one} of them take "
        "what the model takes",
        "devices        1 of 80 GB",
        "step           1 GB for a step's own arrays",
        f"adapter slots  {30 * one / 1e9:.2f} GB: 30 adapters",
        f"KV cache       {tokens * per_token / 1e9:.1f} GB: {tokens} tokens",
        f"host           {host} adapters, {host * one / 1e9:.2f} GB",
        f"disk           1000 adapters, {1000 * one / 1e9:.1f} GB",
    ]
    assert text.splitlines()[1].startswith(f"  rank 4       on all modules: {one / 4e6:.0f} MB")
    large = dataclasses.replace(sizes, weights=80 * 10**9 * 9 // 10)  # as much as one has for it
    with pytest.raises(AssertionError, match="2 devices"):
        plan_text(PlanRequest(), EngineConfig("m", **flags), catalogue, large, two_devices)


def two_devices(size):
    raise AssertionError(f"{size} devices")


def test_devices_that_are_asked_for_are_those_of_the_plan(llama_70b):
    engine = EngineConfig(model="m", max_loras=4, tensor_parallel_size=2)
    sizes, on_each = model_sizes(16_000_000_000, KV, 2), halves(llama_70b)
    text = plan_text(PlanRequest(), engine, llama_70b, sizes, on_each)
    assert "devices        2 of 80 GB" in text
    assert "cost           2 GPUs" in text
    few = dataclasses.replace(engine, lora_memory_bytes=1 << 30)  # of each device
    assert "adapter slots  2.15 GB" in plan_text(PlanRequest(), few, llama_70b, sizes, on_each)
    small = PlanRequest(device_bytes=1e9)
    with pytest.raises(
        ValueError, match=r"2 devices of 1 GB have 1\.8 GB .* raise --tensor-parallel-size"
    ):
        plan_text(small, engine, llama_70b, sizes, on_each)


def test_devices_that_the_plan_takes_have_steps_as_if_asked_for(capsys, tmp_path):
    """A step over several devices has fewer tokens, so more KV pages are left."""
    fields = REAL["Llama-3.1-8B"][0] | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(100 * 10**9)  # without a byte on the disk
    taken = [str(tmp_path), "--plan", "{}"]
    assert launch.main(taken) == launch.main([*taken, "--tensor-parallel-size", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("devices        2 of 80 GB") == 2
    assert text[: len(text) // 2] == text[len(text) // 2 :]


def test_a_trace_says_what_requests_find(llama_70b, tmp_path):
    (tmp_path / "trace").write_text("a\nb\n" * 50 + "c\na\n" * 50)
    request = read_request(json.dumps({"trace": str(tmp_path / "trace"), "device_bytes": 141e9}))
    assert request.adapters == 3
    engine = EngineConfig(model="m", max_loras=2, max_lora_rank=16)
    text = plan_text(
        request, engine, llama_70b, model_sizes(141_000_000_000, KV, 2), halves(llama_70b)
    )
    assert "200 of the trace for 3 adapters: device 98.0%, host 0.5%, disk 1.5%" in text
    assert "the 2 most popular get 75.0%" in text


def test_what_cannot_be_served_is_an_error(llama_70b):
    engine = EngineConfig(model="m", max_loras=1, max_lora_rank=1024)
    request, sizes = PlanRequest(device_bytes=1e9), model_sizes(10**9, 10**5, 2)

    def two_at_most(size):
        if size > 2:
            raise ValueError("8 heads do not divide by 4.")
        return halves(llama_70b)(size)

    said = r"^2 devices of 1 GB have no room for KV .* 4 devices cannot have it: 8 heads do not"
    with pytest.raises(ValueError, match=said):
        plan_text(request, engine, llama_70b, sizes, two_at_most)
    with pytest.raises(ValueError, match=r"^2 devices of 1 GB have no room for KV [^:]*size\.$"):
        plan_text(request, engine, llama_70b, sizes, lambda _: halves(llama_70b)(2))
    large = dataclasses.replace(sizes, weights=10**13)
    with pytest.raises(
        ValueError, match=r"^1024 devices of 1 GB have 922 GB for the model's 10 TB"
    ):
        plan_text(request, engine, llama_70b, large, two_at_most)
    longer = dataclasses.replace(engine, max_model_len=1 << 18)
    with pytest.raises(ValueError, match=r"^max_model_len is 262144, .* Lower max_model_len\.$"):
        plan_text(request, longer, llama_70b, sizes, two_at_most)


def test_devices_are_taken_until_a_steps_arrays_have_room(llama_70b):
    engine, asked = EngineConfig(model="m", max_loras=4), []

    def step(_, devices):  # on one device more than the memory beside 50 GB of weights
        asked.append(devices)
        return 30 * 10**9

    sizes = dataclasses.replace(model_sizes(50 * 10**9, KV, 2), step_bytes=step)
    text = plan_text(PlanRequest(), engine, llama_70b, sizes, halves(llama_70b))
    assert "devices        2 of 80 GB" in text
    assert asked == [1, 2]


WRONG = [
    ("[]", "object"),
    ('{"adaptors": 3}', "'adaptors'"),
    ('{"adapters": 0}', "adapters"),
    ('{"adapters": 1.5}', "an integer"),
    ('{"adapters": 1e7}', "an integer"),
    ('{"adapters": 2000000}', "1,000,000"),
    ('{"zipf": -1}', "zipf"),
    ('{"zipf": true}', "zipf"),
    ('{"price_per_gpu_hour": "2"}', "price_per_gpu_hour"),
    ('{"modules": "q_proj"}', "modules"),
    ('{"guide": 1}', "guide"),
    ('{"trace": 5}', "trace must be the path"),
    ('{"trace": "/nowhere"}', "trace '/nowhere': No such file"),
    ('{"trace": "x", "adapters": 5}', "leave adapters out"),
    ('{"trace": "x", "zipf": 1.0}', "leave zipf out"),
    ("{", "Expecting"),
]


@pytest.mark.parametrize(("text", "named"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests_name_the_field(text, named):
    with pytest.raises(ValueError, match=named):
        read_request(text)
    assert read_request("{}") == PlanRequest()


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
