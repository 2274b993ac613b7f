"""The plan of a deployment: bytes, tiers, hits and cost of a model at hand."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.config import from_hf
from lora_jax.models.registry import model_class
from lora_jax.placement.picture import spell_bytes
from serving.api.config import EngineConfig
from serving.cli.guide import adapter_bytes, attention_of
from serving.cli.plan import DeviceSizes, ModelSizes, PlanRequest, plan_text, read_request

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
    said = r"^64 devices of 1 GB have 57.6 GB for the model's 10 TB of weights; give larger device"
    with pytest.raises(ValueError, match=said):  # no engine takes more
        plan_text(request, engine, llama_70b, large, two_at_most)
    high = PlanRequest(rank=2048, device_bytes=1e9)
    with pytest.raises(ValueError, match=r"^rank 2048 is above max_lora_rank=1024, .*: set --max-"):
        plan_text(high, engine, llama_70b, sizes, two_at_most)
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
