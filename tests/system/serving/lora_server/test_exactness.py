"""A disaggregated engine answers as a coupled one does, bit for bit, for every placement."""

import contextlib
import dataclasses
import itertools
import shutil

import pytest
from support.cases import lora_server_cases as cases

from lora_jax.adapters.catalogue import EXPERT_MODULES
from lora_jax.adapters.kinds import AdapterKind
from serving import Engine, Sampling

SCORED = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
MIXED = ["a0", None, "a1", "a2", None, "a0", "a3", "a1", None, "a2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("lora_server"))


@pytest.fixture(scope="module")
def prompts():
    return cases.prompts_of(len(MIXED))


def answers(engine, prompts, adapters):
    """Everything a caller sees: tokens, texts and the bits of all log-probabilities."""
    outputs = engine.generate(prompts, adapters, SCORED)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.fixture(scope="module")
def coupled(files, prompts):
    return coupled_answers(files, prompts)


def coupled_answers(files, prompts, **changes):
    model, adapters = files
    with Engine(model, adapters, **cases.ENGINE | changes) as engine:
        mixed = answers(engine, prompts, MIXED)
        base = answers(engine, prompts, None)
    for place, adapter in enumerate(MIXED):
        assert (mixed[place] == base[place]) == (adapter is None)
    return mixed, base


ALL = list(itertools.product(cases.PLACEMENTS, ("in_process", "shared_memory", "tcp")))
SOME = (ALL[7],)  # experts and layers over processes


@pytest.mark.parametrize(
    ("placement", "transport"),
    [pytest.param(*one, marks=() if one in SOME else pytest.mark.long) for one in ALL],
)
def test_answers_are_those_of_a_coupled_engine(placement, transport, files, prompts, coupled):
    check_answers(placement, transport, files, prompts, coupled)


@pytest.mark.long  # test_device_memory.py has the emulated transport
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_so_are_those_over_gpus_whose_programs_serve(files, prompts, coupled, gpus):
    check_answers("ep2-pp1", gpus, files, prompts, coupled)


@pytest.mark.parametrize("placement", ["ep2-pp1", pytest.param("ep2-pp2", marks=pytest.mark.slow)])
def test_so_are_those_whose_attention_is_on_the_server_too(placement, files, prompts, coupled):
    check_answers(placement, "shared_memory", files, prompts, coupled, attention=True)


@pytest.mark.parametrize(
    ("placement", "transport"),
    [
        ("ep2-pp1", "shared_memory"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (ALL[2], ALL[3], ALL[9])),
    ],
)
def test_so_are_those_of_an_instance_over_two_devices(
    placement, transport, files, prompts, coupled
):
    """Each device sends the rows of its own experts, to ranks that hold parts of others too."""
    check_answers(placement, transport, files, prompts, coupled, devices=2)


@pytest.fixture(scope="module")
def in_8_bits(files, prompts, coupled):
    made = coupled_answers(files, prompts, lora_dtype="int8")
    assert made[1] == coupled[1]
    assert made[0] != coupled[0]
    return made


@pytest.mark.long  # the next one has experts on the ranks
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "experts"])
def test_so_are_those_of_adapters_in_8_bits(attention, files, prompts, in_8_bits):
    more = {"attention": attention, "lora_dtype": "int8"}
    check_answers("ep2-pp2", "in_process", files, prompts, in_8_bits, **more)


def test_so_are_those_of_stand_ins_in_8_bits(files, prompts, in_8_bits):
    """The instance keeps whole adapters in 8 bits, and computes them once the ranks are gone."""
    model, adapters = files
    spec = cases.make_spec(model, "ep2-pp1", lora_dtype="int8")
    sizes = cases.ENGINE | {"lora_dtype": "int8"}
    mixed, _ = in_8_bits
    with contextlib.ExitStack() as stack:
        with cases.running(spec, "shared_memory") as ranks:
            access = dataclasses.replace(ranks.access(), local_slots=2)
            engine = stack.enter_context(Engine(model, adapters, lora_server=access, **sizes))
            assert answers(engine, prompts, MIXED) == mixed
        for place in (0, 3):
            assert answers(engine, [prompts[place]], MIXED[place]) == [mixed[place]]


def check_answers(placement, transport, files, prompts, coupled, devices=1, **changes):
    model, adapters = files
    spec = cases.make_spec(model, placement, **changes)
    sizes = cases.ENGINE | {"tensor_parallel_size": devices, "lora_dtype": spec.lora_dtype}
    with (
        cases.running(spec, transport) as ranks,
        Engine(model, adapters, lora_server=ranks.access(), **sizes) as engine,
    ):
        mixed, base = coupled
        assert answers(engine, prompts, None) == base
        client = engine._parts.residencies.of(AdapterKind.LORA).server.link.client
        kept = {name for entry in engine.registry.entries() for name, _ in entry.weights.sites}
        assert ("q_proj" in kept) == (len(client.shapes.sites) == 2)
        assert not kept & set(EXPERT_MODULES)
        assert client.stats().pushes == 0  # base-only batches send nothing
        assert not ranks.coordinator.held()
        assert answers(engine, prompts, MIXED) == mixed
        assert client.stats().pushes > 0
        for adapter, place in (("a0", 0), (None, 1), ("a2", 3)):
            assert answers(engine, [prompts[place]], adapter) == [mixed[place]]
        assert engine.stats().compilations_after_warmup == 0
        counts = [server.stats() for server in ranks.servers]
    assert all(count.answered > 0 for count in counts)
    assert all(count.refused == count.compilations == 0 for count in counts)
    assert len(ranks.coordinator.held()) == 4
    assert not any(ranks.coordinator.held().values()), "leases are left"


@pytest.mark.slow
def test_in_bfloat16_the_bits_are_the_same_too(files, prompts):
    model, adapters = files
    sizes = cases.ENGINE | {"dtype": "bfloat16"}
    with Engine(model, adapters, **sizes) as engine:
        mixed = answers(engine, prompts, MIXED)
    with (
        cases.running(cases.make_spec(model, "ep2-pp2", dtype="bfloat16")) as ranks,
        Engine(model, adapters, lora_server=ranks.access(), **sizes) as engine,
    ):
        assert answers(engine, prompts, MIXED) == mixed
