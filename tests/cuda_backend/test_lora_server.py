"""A LoRA Server on one GPU and an engine on another answer as one engine with all adapters does."""

import jax
import lora_server_cases as cases
import pytest
import tiny_checkpoint
from tiny_checkpoint import TinyShape

from serving import Engine, Sampling
from serving.lora_server.group import ServerGroup
from serving.lora_server.instance import ServerAccess
from serving.lora_server.spec import ServerSpec
from serving.transport import carriers

pytestmark = pytest.mark.multigpu
SHAPE = TinyShape(max_positions=96, experts=4, hidden=256, width=128, layers=2)
RANKS = (2, 3, 8, 1)
MIXED = ["a0", None, "a1", "a2", None, "a0", "a3", "a1", None, "a2"]
SCORED = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
TOKENS = 32
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 16,
    "max_num_batched_tokens": TOKENS,
    "kv_cache_memory_bytes": 16 << 20,
    "max_loras": 4,
    "max_lora_rank": 8,
    "max_esft_adapters": 0,
}


@pytest.fixture(autouse=True)
def _needs_two_gpus():
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora_server")
    tiny_checkpoint.write_model(folder / "model", SHAPE)
    for place, rank in enumerate(RANKS):
        tiny_checkpoint.write_adapter(folder / f"a{place}", SHAPE, rank, seed=place)
    return str(folder / "model"), {f"a{n}": str(folder / f"a{n}") for n in range(len(RANKS))}


def answers(engine, adapters):
    outputs = engine.generate(cases.prompts_of(len(MIXED)), adapters, SCORED)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_answers_are_those_of_a_coupled_engine(files):
    model, adapters = files
    with Engine(model, adapters, **ENGINE) as engine:
        mixed, base = answers(engine, MIXED), answers(engine, None)
    for place, adapter in enumerate(MIXED):
        assert (mixed[place] == base[place]) == (adapter is None)
    sizes = {"num_adapters": 4, "max_rank": 8, "max_rows": TOKENS * SHAPE.top_k}
    spec = ServerSpec(model, "bfloat16", "ep1-pp1", 1, **sizes)
    group = ServerGroup(spec, first_gpu=1)
    try:
        access = ServerAccess(
            spec,
            "one",
            group.coordinator,
            lambda terms: carriers.open_client(group.paths, terms),
            wait_s=5.0,
        )
        with Engine(model, adapters, lora_server=access, **ENGINE) as engine:
            assert answers(engine, None) == base
            client = engine._parts.loader._remote.link.client
            assert client.stats().pushes == 0
            assert answers(engine, MIXED) == mixed
            assert answers(engine, MIXED) == mixed
            assert client.stats().pushes > 0
            assert engine.stats().compilations_after_warmup == 0
        (counts,) = [process.stats() for process in group.processes]
    finally:
        group.close()
    assert counts["answered"] > 0
    assert counts["refused"] == counts["compilations"] == 0
