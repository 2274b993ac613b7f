"""A LoRA Server on one GPU and an engine on another answer as one engine with all adapters does."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
from support.cases import lora_server_cases as cases
from support.cases import tiny_checkpoint
from support.cases.engine_cases import settle
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.adapters.kinds import AdapterKind
from serving import Engine, Sampling
from serving.lora_server.group import ServerGroup
from serving.lora_server.instance import ServerAccess
from serving.lora_server.spec import ServerSpec
from serving.lora_server.transport import selection

pytestmark = pytest.mark.multigpu
SHAPE = TinyShape(vocab=512, max_positions=96, experts=4, hidden=256, width=128, layers=2)
RANKS = (2, 3, 8, 1)
MIXED = ["a0", None, "a1", "a2", None, "a0", "a3", "a1", None, "a2"]
SCORED = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
LONG = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
WAIT_S = 1.0  # one exchange; a killed rank is known at once
TOKENS = 8  # of a step: one bucket, since every program takes seconds to compile
PROMPTS = cases.prompts_of(len(MIXED))
ENGINE: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": TOKENS,
    "max_num_batched_tokens": TOKENS,
    "kv_cache_memory_bytes": 16 << 20,
    "max_loras": 4,
    "max_lora_rank": 8,
    "max_esft_adapters": 0,
}


@pytest.fixture(scope="module", autouse=True)
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


@pytest.fixture(scope="module", params=["experts", "attention too"])
def kind(request):
    """What of adapters is on the server, and the dtype.

    Kernels that add to bfloat16 y round once, and what comes back in bfloat16 has been rounded
    before: of attention, which is added so, the bits are the same in float32 alone.
    """
    attention = request.param == "attention too"
    return attention, "float32" if attention else "bfloat16"


@pytest.fixture(scope="module")
def starting(files, kind):
    """The server, on the second GPU, which compiles while a coupled engine answers."""
    attention, dtype = kind
    sizes = {"num_adapters": 4, "max_rank": 8, "max_rows": TOKENS * SHAPE.top_k}
    spec = ServerSpec(files[0], dtype, "ep1-pp1", 1, attention=attention, **sizes)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(ServerGroup, spec, first_gpu=1)
        yield made
        made.result().close()


@pytest.fixture(scope="module")
def coupled(files, kind):
    """Answers to a mixed batch, to the base alone, and the tokens of long ones, of one engine."""
    with Engine(*files, dtype=kind[1], **ENGINE) as engine:
        long = engine.generate(PROMPTS[:6], MIXED[:6], LONG)
        answered = answers(engine, MIXED), answers(engine, None)
        return *answered, [list(output.outputs[0].token_ids) for output in long]


@pytest.fixture(scope="module")
def group(starting, coupled):
    return starting.result()


@pytest.fixture(scope="module")
def engine(files, group):
    def connect(terms, device):
        return selection.open_client_at(group.places, terms, device=device)

    access = ServerAccess(group.spec, "one", group.coordinator, connect, WAIT_S)
    with Engine(*files, lora_server=access, dtype=group.spec.dtype, **ENGINE) as made:
        yield made


def answers(engine, adapters):
    outputs = engine.generate(PROMPTS, adapters, SCORED)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs]


def tokens_of(answered):
    return [tokens for tokens, _ in answered]


def test_a_mixed_batch_has_the_tokens_of_a_coupled_engine(engine, group, coupled):
    mixed, base, _ = map(list, coupled)
    for place, adapter in enumerate(MIXED):
        assert (tokens_of(mixed)[place] == tokens_of(base)[place]) == (adapter is None)
    client = engine._parts.residencies.of(AdapterKind.LORA).server.link.client
    assert tokens_of(answers(engine, None)) == tokens_of(base)
    assert client.stats().pushes == 0
    kept = {name for entry in engine.registry.entries() for name, _ in entry.weights.sites}
    assert ("q_proj" in kept) == (not group.spec.attention)
    assert tokens_of(answers(engine, MIXED)) == tokens_of(mixed)
    assert client.stats().pushes > 0
    assert engine.stats().compilations_after_warmup == 0
    (counts,) = [process.stats() for process in group.processes]
    assert counts["answered"] > 0
    assert counts["refused"] == counts["compilations"] == 0


def test_log_probabilities_have_the_bits_of_a_coupled_engine(engine, coupled):
    assert answers(engine, MIXED) == coupled[0]


def test_a_killed_server_is_told_of_and_comes_back(engine, group, coupled):
    want = coupled[2]

    def ask(place):
        return cases.Asked(engine, PROMPTS[place], MIXED[place], LONG)

    asked = [ask(place) for place in range(6)]
    assert all(one.started.wait(60) for one in asked)
    os.kill(group.processes[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    for one, tokens in zip([ask(0), *asked], [want[0], *want], strict=True):
        failed = cases.check_ended(one, tokens)
        assert not (failed and one.adapter is None), "a request of the base model failed"
    told = time.monotonic() - killed
    assert not cases.check_ended(ask(1), want[1])
    cases.answer_again(lambda: ask(0), want[0])
    print(f"all told after {told:.2f} s, adapters again after {time.monotonic() - killed:.1f} s")
    assert told < 2
    settle(engine)
    assert tokens_of(answers(engine, MIXED)) == tokens_of(coupled[0])
    assert engine.stats().compilations_after_warmup == 0
