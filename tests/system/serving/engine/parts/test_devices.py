"""An engine over several devices answers with the bits of one, or says at its start why not."""

import dataclasses
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.cases import tiny_checkpoint, tiny_esft
from support.cases.engine_cases import (
    GREEDY,
    SCORED,
    answer,
    planned_together,
    prompts_of,
    settle,
)
from support.cases.head_cases import write_head
from support.cases.tiny_checkpoint import TinyShape
from support.doubles.paying_drafts import num_drafts, send_all_drafts
from support.processes.server_process import ROOT

from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.models import split as models_split
from lora_jax.nn import gather
from lora_jax.sharding import Split, make_mesh
from serving import Engine, RequestFailed, Sampling
from serving.api.config import EngineConfig
from serving.engine.parts import devices as devices_module
from serving.engine.parts.devices import local_widths, log_devices, split_of
from serving.lora_server.instance import ServerAccess
from serving.lora_server.spec import ServerSpec

SHAPES = {
    "llama": TinyShape(layers=1, max_positions=64),
    "mixtral": TinyShape(layers=1, max_positions=64, experts=4),
    "mixtral for four": TinyShape(layers=1, max_positions=64, experts=4, kv_heads=4),
}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "block_size": 4, "max_loras": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
NGRAM |= {"prompt_lookup_min": 1}
PAGE_BYTES = {"float32": 256, "bfloat16": 128}  # of a head
NUM_PAGES = 18  # few enough that some of eight sequences are preempted


def write(folder, kind):
    shape = SHAPES[kind]
    tiny_checkpoint.write_model(folder / "model", shape)
    for rank in (1, 3, 4):
        tiny_checkpoint.write_adapter(folder / f"a{rank}", shape, rank, seed=rank)
    tiny_checkpoint.write_adapter(folder / "head", shape, 2, seed=7)
    weight = np.random.default_rng(7).normal(size=(5, shape.hidden))
    write_head(folder / "head", list("abcde"), weight, weight[:, 0], base="model")
    return folder


def run(folder, dtype, devices, *, kv_heads=2, **fields):
    """Answers to base and adapters in one batch, then to a name that was loaded again."""
    adapters = {name: str(folder / name) for name in ("a1", "a3", "a4", "head")}
    bytes_ = NUM_PAGES * PAGE_BYTES[dtype] * kv_heads // devices
    fields |= SIZES | {"kv_cache_memory_bytes": bytes_, "max_lora_rank": 4, "dtype": dtype}
    sampled = Sampling(max_tokens=8, temperature=1.0, seed=3, top_k=20, logprobs=0)
    scored = dataclasses.replace(SCORED, prompt_logprobs=1)
    samplings = [scored, sampled, GREEDY]
    prompts, names = prompts_of(9, high=30), [None, "a1", "a3"]
    engine = Engine(
        str(folder / "model"), adapters, tensor_parallel_size=devices, max_esft_adapters=0, **fields
    )
    with engine:
        if "speculative_config" in fields:
            send_all_drafts(engine)
        with planned_together(engine, len(prompts)):  # so that some are preempted
            outputs = engine.generate(prompts, names * 3, [s for s in samplings for _ in names])
        outputs += engine.generate(prompts[:1], {"a1": 0.5, "a3": 2.0}, scored)
        bound = dataclasses.replace(scored, structured_outputs={"regex": "[ab]{12}"})
        outputs += engine.generate(prompts[:2], ["a3", None], [bound, sampled])
        assert set(outputs[-2].outputs[0].text) <= set("ab")
        engine.load_adapter("a1", str(folder / "a4"), replace=True)
        outputs += engine.generate(prompts[:2], "a1", scored)
        outputs += engine.generate(prompts[:2], "a4", scored)
        heads = [found.outputs for found in engine.classify(prompts, "head")]
        settle(engine)
        stats = engine.stats()
        assert "speculative_config" not in fields or num_drafts(engine)[2] > 0
    assert stats.compilations_after_warmup == 0
    assert stats.adapter_swaps
    assert stats.preemptions
    answers = [answer(output) for output in outputs]
    assert answers[-4:-2] == answers[-2:]
    assert len({repr(each) for each in answers}) == 14
    assert len({found.logits for found in heads}) == len(prompts)
    return [*answers, *heads]


@pytest.mark.parametrize(
    ("kind", "dtype", "fields"),
    [
        ("mixtral", "bfloat16", {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("llama", "float32", {}),
                ("llama", "bfloat16", {}),
                ("mixtral", "float32", {}),
                # models/test_split.py has this split of experts in the default suite.
                ("mixtral", "bfloat16", {"enable_expert_parallel": False}),
                ("mixtral", "float32", {"enable_expert_parallel": False}),
                ("mixtral", "bfloat16", {"speculative_config": NGRAM}),
                ("llama", "float32", {"speculative_config": NGRAM}),
            )
        ),
    ],
    ids=lambda value: "-".join(value) or "ep" if isinstance(value, dict) else value,
)
def test_answers_are_those_of_one_device(tmp_path, kind, dtype, fields):
    """Chunked prompts, preempted sequences, adapters that take turns, and one that is reloaded."""
    write(tmp_path, kind)
    want = run(tmp_path, dtype, 1)
    assert run(tmp_path, dtype, 2, **fields) == want


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_devices_answer_as_one(tmp_path, dtype):
    write(tmp_path, "mixtral for four")
    want = run(tmp_path, dtype, 1, kv_heads=4)
    for expert_parallel in (True, False):
        got = run(tmp_path, dtype, 4, kv_heads=4, enable_expert_parallel=expert_parallel)
        assert got == want


def run_esft(root, base, dtype, devices, kv_heads, **fields):
    """Answers to base, LoRA and ESFT in one batch, where ESFT adapters take turns in one slot."""
    layers = tiny_esft.MIXTRAL.layers
    adapters = {name: str(root / name) for name in ("lora", "e0", "e1")}
    fields |= SIZES | {"max_lora_rank": 4, "max_esft_adapters": 1, "max_esft_experts": 3}
    bytes_ = NUM_PAGES * PAGE_BYTES[dtype] * layers * kv_heads // devices
    fields |= {"kv_cache_memory_bytes": bytes_, "dtype": dtype}
    names = [None, "lora", "e0", "e1"]
    with Engine(str(base), adapters, tensor_parallel_size=devices, **fields) as engine:
        with planned_together(engine, 8):
            outputs = engine.generate(prompts_of(8, high=20), names * 2, SCORED)
        outputs += engine.generate(prompts_of(4, high=20), names, SCORED)
        outputs += engine.generate(prompts_of(1), {"lora": 1.0, "e1": 1.0}, SCORED)
        settle(engine)
        stats = engine.stats()
        assert stats.compilations_after_warmup == 0
        assert stats.adapter_swaps
        assert stats.preemptions
        answers = [answer(output) for output in outputs]
    assert answers[:4] == answers[8:12]
    return answers


def write_esft(folder, devices):
    """Write a model with a LoRA adapter and two ESFT adapters; return its folder and theirs."""
    shape = dataclasses.replace(tiny_esft.MIXTRAL, experts=4 + devices, kv_heads=devices)
    base = folder / "base"
    tiny_checkpoint.write_model(base, shape)
    tiny_checkpoint.write_adapter(folder / "lora", shape, 3, seed=1)
    for place, experts in enumerate(({0: (1, 4), 1: (2,)}, {1: (0, 2, 5)})):
        tiny_esft.write_esft_adapter(folder / f"e{place}", base, experts, place)
    return base, folder


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("devices", [2, 4])
def test_esft_adapters_answer_as_on_one_device(tmp_path, devices, dtype):
    base, adapters = write_esft(tmp_path, devices)
    want = run_esft(adapters, base, dtype, 1, devices)
    for expert_parallel in (True, False):
        split = {"enable_expert_parallel": expert_parallel}
        assert run_esft(adapters, base, dtype, devices, devices, **split) == want


@pytest.mark.long
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_a_whole_attention_output_answers_as_one_device(tmp_path, monkeypatch, expert_parallel):
    """Steps of 8 tokens share their rows, shorter ones do not; LoRA, then ESFT beside it."""
    write(tmp_path, "mixtral")
    base, adapters = write_esft(tmp_path / "esft", devices=2)
    want = run(tmp_path, "bfloat16", 1), run_esft(adapters, base, "bfloat16", 1, 2)
    monkeypatch.setattr(models_split, "attention_output", lambda config: "whole")
    monkeypatch.setattr(gather, "SHARED_ROWS", 8)
    fields = {"enable_expert_parallel": expert_parallel}
    assert run(tmp_path, "bfloat16", 2, **fields) == want[0]
    assert run_esft(adapters, base, "bfloat16", 2, 2, **fields) == want[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be in \[1, 64\], got 0"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer"),
        ({"enable_expert_parallel": True}, "set tensor_parallel_size to their number"),
        ({"enable_expert_parallel": 1}, "enable_expert_parallel must be true or false, got 1"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig("m", **fields)


def test_refusals_come_before_anything_is_loaded(tmp_path):
    write(tmp_path, "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="num_key_value_heads 2 must divide by 4"):
        Engine(str(tmp_path / "model"), tensor_parallel_size=4)
    config = tmp_path / "model" / "config.json"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config.write_text(json.dumps(json.loads(config.read_text()) | heads))
    assert len(jax.devices()) == 4  # which jax does not make anew
    with pytest.raises(ValueError, match="but there are 4 devices"):
        Engine(str(tmp_path / "model"), tensor_parallel_size=8)
    with pytest.raises(ValueError, match="isolation 'server' is for one device"):
        Engine(str(tmp_path / "model"), tensor_parallel_size=2, lora_server=object())


@pytest.mark.parametrize(
    ("fields", "spec", "slots", "message"),
    [
        ({"enable_expert_parallel": False}, {}, 0, "does not go with enable_expert_parallel False"),
        ({}, {"attention": True}, 0, "lora_attention remote"),
        ({}, {}, 2, "local_expert_slots: leave that out, or set tensor_parallel_size to 1"),
    ],
)
def test_what_a_lora_server_does_not_hold_for_several_devices(
    tmp_path, fields, spec, slots, message
):
    write(tmp_path, "mixtral")
    asked = ServerSpec(str(tmp_path / "model"), "float32", "ep1-pp1", 1, 4, 4, 64, **spec)
    access = ServerAccess(asked, "one", None, None, local_slots=slots)
    with pytest.raises(ValueError, match=message):
        Engine(str(tmp_path / "model"), tensor_parallel_size=2, lora_server=access, **fields)


def test_the_log_says_where_the_model_lies(tmp_path, caplog):
    write(tmp_path, "mixtral")
    config = EngineConfig(str(tmp_path / "model"), tensor_parallel_size=2)
    with caplog.at_level("INFO", logger="serving"):
        log_devices(split_of(config))
        log_devices(split_of(dataclasses.replace(config, tensor_parallel_size=1)))
    several, one = caplog.messages
    assert "2 devices" in several
    assert "whole experts" in several
    assert one.startswith("Mesh: one device")


def test_members_of_a_gang_make_their_part_of_the_devices_and_meet_before_they_look(
    tmp_path, monkeypatch
):
    write(tmp_path, "mixtral")
    done = []
    made = SimpleNamespace(update=lambda *field: done.append(field), jax_num_cpu_devices=4)
    monkeypatch.setattr(devices_module.jax, "config", made)
    monkeypatch.setattr(devices_module.jax, "local_devices", lambda: jax.devices()[:1])
    gang = SimpleNamespace(size=2, start_jax=lambda: done.append("met"), shared=lambda own: own)
    config = EngineConfig(str(tmp_path / "model"), tensor_parallel_size=2)
    split = split_of(config, gang)
    # Also where XLA_FLAGS asks for more: the model would lie on those of the first host alone.
    assert (split.size, done) == (2, [("jax_num_cpu_devices", 1), "met"])
    gang.shared = lambda own: [*own, "avx1024"]
    with pytest.raises(
        ValueError, match="CPUs of rank 0 and of this host differ in avx1024: their"
    ):
        split_of(config, gang)
    monkeypatch.setattr(devices_module.jax, "default_backend", lambda: "gpu")
    devices_module._require_kind(gang)  # GPUs compute, and are compared by their kind
    monkeypatch.setattr(devices_module.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(devices_module.jax, "local_devices", lambda: jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"2 takes 1 devices of each node, and this one has 2 \(cpu"
    ):
        split_of(config, gang)


def test_adapters_lie_as_the_maps_do():
    whole = Split(make_mesh(2), "tp", attention_output="whole")
    assert local_widths(whole) == LocalWidths(2, False, 128, whole_attention_output=True)
    assert local_widths(Split(make_mesh(4))) == LocalWidths(4, True, 256)
    assert local_widths(None) is None


def test_a_process_makes_its_own_cpu_devices(tmp_path):
    write(tmp_path, "llama")
    code = (
        "import sys; from serving.api.config import EngineConfig; import jax; "
        "from serving.engine.parts.devices import split_of; "
        "print(split_of(EngineConfig(sys.argv[1], tensor_parallel_size=2)).size, "
        "len(jax.devices()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["2", "2"], done.stderr[-2000:]


def test_an_engine_ends_when_its_devices_lose_each_other(tmp_path, monkeypatch):
    """No token of a step whose exchange failed is ever sent."""
    lost = threading.Event()

    def check():
        if lost.is_set():
            raise RuntimeError("GPU 0 got no answer from GPU 1")

    group = SimpleNamespace(number=7, check=check)
    monkeypatch.setattr(models_split, "open_group", lambda devices: group)
    write(tmp_path, "llama")
    sizes = SIZES | {"max_lora_rank": 4, "structured_outputs": False}
    engine = Engine(str(tmp_path / "model"), tensor_parallel_size=2, **sizes)
    with engine:
        assert engine.generate([[5, 6]], None, GREEDY)[0].outputs[0].token_ids
        lost.set()
        with pytest.raises(RequestFailed):
            engine.generate([[5, 6]], None, GREEDY)
        assert not engine.is_alive()


WIDE = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.multigpu
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_two_gpus_answer_with_the_bits_of_one(tmp_path, expert_parallel):
    """Tokens and log-probabilities in bfloat16, base and two adapters in a batch, long prompts."""
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(WIDE))
    adapters = {}
    for rank in (8, 32):
        folder = tmp_path / f"r{rank}"
        folder.mkdir()
        adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": TARGETS}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        adapters[folder.name] = str(folder)
    fields = {"load_format": "dummy", "max_loras": 2, "max_lora_rank": 32, "max_num_seqs": 16}
    fields |= {"max_num_batched_tokens": 512, "max_esft_adapters": 0}
    fields |= {"kv_cache_memory_bytes": 64 << 20}
    prompts = prompts_of(12, high=300)
    names = [None, "r8", "r32"] * 4
    scored = dataclasses.replace(SCORED, max_tokens=24, prompt_logprobs=1)
    answers = []
    for devices in (1, 2):
        more = {"enable_expert_parallel": expert_parallel} if devices > 1 else {}
        sizes = {"tensor_parallel_size": devices} | more
        with Engine(str(tmp_path / "model"), adapters, **fields, **sizes) as engine:
            outputs = engine.generate(prompts, names, scored)
            assert engine.stats().compilations_after_warmup == 0
            answers.append([answer(output) for output in outputs])
            found = engine.stats().implementations.get("all_gather", [])
    assert answers[0] == answers[1]
    assert {choice["implementation"] for choice in found} == {"cuda"}
