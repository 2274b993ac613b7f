"""An engine whose adapters are all in another process answers as one that holds them itself."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from support.cases import lora_server_cases as cases
from support.cases import tiny_checkpoint
from support.cases.feature_pairs import FEATURES
from support.waiting import wait_until

from lora_jax.quantize import quantize
from serving import Engine, Sampling
from serving.functions import adapters_process
from serving.lora_server.shared_side import SharedAccess
from serving.lora_server.tenant_side import report_of
from serving.lora_server.transport import device_memory, selection

SCORED = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
MIXED = ["a0", None, "a1", "a0", None, "a1"]


HOST, GPUS = "host", "emulated GPUs"
CASES = [
    (0, GPUS),
    (4, HOST),
    pytest.param((0, HOST), marks=pytest.mark.long),
    pytest.param((4, GPUS), marks=pytest.mark.long),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} experts, memory of {case[1]}")
def case(request):
    return request.param


@pytest.fixture
def files(case, tmp_path):
    return written(tmp_path, case[0])


def written(tmp_path, experts, **size):
    """Return the folder of a model and those of two adapters, by name."""
    shape = dataclasses.replace(cases.SHAPE, experts=experts, **size)
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    for place, rank in enumerate(cases.RANKS[:2]):
        folder = tmp_path / f"a{place}"
        tiny_checkpoint.write_adapter(folder, shape, rank, seed=place)
        tensors = load_file(folder / "adapter_model.safetensors")
        kept = {name: t for name, t in tensors.items() if "moe.gate." not in name}
        save_file(kept, folder / "adapter_model.safetensors")  # without the router
    return str(tmp_path / "model"), {f"a{n}": str(tmp_path / f"a{n}") for n in range(2)}


def answers(engine, adapters):
    prompts = cases.prompts_of(len(MIXED))
    outputs = engine.generate(prompts, adapters, SCORED)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture
def coupled(files):
    model, adapters = files
    with Engine(model, adapters, **cases.ENGINE) as engine:
        return answers(engine, MIXED)


class Apart:
    """Both ends in this process, and the calls that an agent makes."""

    def __init__(self, model: str, folder: Path, **fields):
        self.access = SharedAccess(2, 60.0, str(folder / "adapters"))
        fields = cases.ENGINE | {"max_loras": 2} | fields
        self.engine = Engine(model, {}, lora_server=self.access, **fields)
        sizes = self.access.sizes(self.engine.config)
        order = {"model": model, "address": self.access.address, **sizes}
        self.adapters = adapters_process.Adapters(order)
        self.freed: list[int] = []
        side = self.access.side
        assert side is not None
        self.side, side.on_free = side, self.freed.append

    def hold(self, name: str, folder: str, number: int) -> None:
        report = report_of(self.adapters.load(number, name, folder))
        digest = self.side.sit(name, report, number, number + 1, 1)
        options = {"replace": True, "pinned": True, "confined": False}
        self.engine.registry.load(name, name, digest=digest, **options)

    def drop(self, name: str, number: int) -> None:
        assert self.side.leave(name, number + 1)
        self.engine.registry.unload(name)

    def close(self) -> None:
        self.engine.close()
        self.adapters.server.stop()


@pytest.fixture
def apart(request, case, files, tmp_path, monkeypatch):
    if case[1] == GPUS:
        if shutil.which("g++") is None:
            pytest.skip("no C++ compiler")
        gpus = request.getfixturevalue("gpus")
        monkeypatch.setattr(
            selection,
            "open_server",
            lambda path, terms, rank: device_memory.open_server(path, terms, rank, gpus.device(1)),
        )
        monkeypatch.setattr(
            selection,
            "open_client",
            lambda paths, terms, **options: device_memory.open_client(
                paths, terms, gpus.device(0), **options
            ),
        )
    made = Apart(files[0], tmp_path)
    yield made
    made.close()


def test_tokens_and_log_probabilities_are_the_coupled_engines(apart, files, coupled):
    """Adapters come and go; a place is taken again when no step can have rows of its last one."""
    apart.hold("a0", files[1]["a0"], 0)
    apart.hold("a1", files[1]["a1"], 1)
    assert answers(apart.engine, MIXED) == coupled
    apart.drop("a0", 0)
    wait_until(lambda: apart.freed == [0])  # callers have their answers before the last step ends
    apart.adapters.unload(0)
    apart.hold("a0", files[1]["a0"], 2)  # in the place of number 0
    assert answers(apart.engine, MIXED) == coupled
    wait_until(lambda: not apart.side.is_busy and not apart.side._live)
    apart.side.check_integrity()


@pytest.mark.long
@pytest.mark.parametrize(
    "feature", ["KV cache in 8 bits", "KV pages on the host", "quantised base"]
)
def test_features_in_which_no_adapter_has_a_part_work_beside_it(feature, tmp_path):
    """The rows of docs/reference/feature-pairs.md about isolation server."""
    model, adapters = written(tmp_path, 0, hidden=64, width=64)  # groups of quantised weights
    fields = FEATURES[feature].fields
    if "max_model_len" in fields:
        fields = fields | {"max_model_len": 32}  # for the longest of these prompts
    if feature == "quantised base":
        model = str(tmp_path / "nf4" / "model")
        quantize(tmp_path / "model", "nf4", Path(model))
    with Engine(model, adapters, **cases.ENGINE | fields) as engine:
        want = answers(engine, MIXED)
    apart = Apart(model, tmp_path, **fields)
    try:
        for number, (name, folder) in enumerate(adapters.items()):
            apart.hold(name, folder, number)
        assert answers(apart.engine, MIXED) == want
        if feature == "KV pages on the host":
            wait_until(lambda: apart.engine.stats().host_pages.used)
    finally:
        apart.close()
