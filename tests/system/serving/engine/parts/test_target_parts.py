"""An engine whose adapters may change some modules alone answers as one with room for all."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file
from support.cases import tiny_checkpoint
from support.cases.engine_cases import SCORED, answer, prompts_of
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.config import from_hf
from lora_jax.models import model_class
from serving import Engine
from serving.api.config import EngineConfig
from serving.engine.parts.pairs import Beside, check_pairs
from serving.engine.parts.target_parts import take_targets

SHAPE = TinyShape(layers=2, max_positions=96, experts=4)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "max_lora_rank": 4}
SIZES |= {"kv_cache_memory_bytes": 1 << 18, "structured_outputs": False}
ATTENTION = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("targets")
    tiny_checkpoint.write_model(made / "model", SHAPE)
    for number in (1, 2):
        tiny_checkpoint.write_adapter(made / f"all{number}", SHAPE, 3, seed=number)
        cut(made / f"all{number}", made / f"few{number}", ATTENTION)
    return made


def cut(source, to, targets):
    """Write an adapter that has LoRA on these modules alone."""
    to.mkdir()
    tensors = load_file(source / "adapter_model.safetensors")
    kept = {n: t for n, t in tensors.items() if n.split(".lora_")[0].split(".")[-1] in targets}
    save_file(kept, to / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(targets)}))


def answers(folder, names, **fields):
    prompts = prompts_of(6, high=20)
    adapters = {name: str(folder / name) for name in names}
    with Engine(str(folder / "model"), adapters, **SIZES, **fields) as engine:
        asked = [None, *names] * 2
        outputs = engine.generate(prompts, asked[: len(prompts)], SCORED)
        return [answer(output) for output in outputs], engine.stats()


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_target_modules": ATTENTION},
        {"lora_target_modules": ["auto"], "lora_merge": "auto"},
        {"lora_target_modules": ["self_attn.q_proj", "v_proj"], "tensor_parallel_size": 2},
    ],
    ids=["named", "given, merged", "split"],
)
def test_answers_have_the_bits_of_room_for_all(folder, fields):
    names = ["few1", "few2"]
    found, stats = answers(folder, names, **fields)
    assert found == answers(folder, names)[0]
    assert stats.compilations_after_warmup == 0


def test_others_are_refused_by_name_and_the_rest_goes_on(folder):
    with Engine(
        str(folder / "model"),
        {"few1": str(folder / "few1")},
        lora_target_modules=ATTENTION,
        **SIZES,
    ) as engine:
        with pytest.raises(ValueError, match=r"changes experts\.down_proj.*lora_target_modules"):
            engine.load_adapter("all", str(folder / "all1"))
        engine.load_adapter("few2", str(folder / "few2"))
        assert engine.generate(prompts_of(1), "few2", SCORED)[0].outputs[0].token_ids


def test_a_name_of_no_module_ends_the_start(folder):
    with pytest.raises(ValueError, match=r"lora_target_modules: 'query' is no module of mixtral"):
        Engine(str(folder / "model"), lora_target_modules=["query"], **SIZES)


def test_a_lora_server_does_not_go_with_chosen_modules(folder):
    config = EngineConfig(str(folder / "model"), lora_target_modules=ATTENTION)
    model = from_hf(json.loads((folder / "model" / "config.json").read_text()))
    with pytest.raises(ValueError, match="lora_target_modules is for adapters that the instances"):
        check_pairs(config, model, Beside(lora_server=True))
    with pytest.raises(ValueError, match="lora_target_modules does not go with isolation"):
        check_pairs(config, model, Beside(lora_server=True, tenants=True))
    check_pairs(config, model, Beside())
    check_pairs(dataclasses.replace(config, lora_target_modules=None), model, Beside(True))


def test_over_hosts_rank_0_says_which_modules(folder):
    class Follower:
        """What a member gets that has neither the flag nor adapters."""

        def __init__(self):
            self.said = [("auto",), frozenset({"q_proj"})]

        def shared(self, value):
            return self.said.pop(0)

    config = from_hf(json.loads((folder / "model" / "config.json").read_text()))
    model = SimpleNamespace(module_names=())
    catalogue = model_class(config.model_type).catalogue(config)
    own = EngineConfig(str(folder / "model"))
    made = take_targets(model, catalogue, own, {}, Follower(), is_shared=False)
    assert made.module_names == model.module_names == ("q_proj",)
