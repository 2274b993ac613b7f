"""Weighted sums in a running engine: the bits of PEFT's `cat`, beside every other kind of row."""

import json

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import tiny_esft
from support.cases.engine_cases import SCORED, SHAPES, answer, make_engine, prompts_of, settle
from support.cases.esft_cases import SIZES
from support.processes.http_server import client_of

from serving import Engine
from serving.http.app import create_app
from serving.http.settings import HttpSettings

WEIGHTS = {"a1": 0.7, "a3": -0.3}  # of ranks 2 and 4


@pytest.fixture(scope="module", params=["llama", pytest.param("mixtral", marks=pytest.mark.long)])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with make_engine(folder, SHAPES[request.param]) as engine:
        yield engine, folder
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0


def write_cat(folder, parts):
    """Write the file that PEFT's add_weighted_adapter(combination_type="cat") would save."""
    tensors, rank = {}, 0
    for path, weight in parts.items():
        config = json.loads((path / "adapter_config.json").read_text())
        scaling, rank = config["lora_alpha"] / config["r"], rank + config["r"]
        for name, value in load_file(path / "adapter_model.safetensors").items():
            is_a = ".lora_A." in name
            if is_a:  # PEFT: lora_A.data * weight * scaling
                value = value * np.float32(weight) * np.float32(scaling)
            tensors.setdefault(name, []).append(value)
    joined = {n: np.concatenate(v, axis=0 if ".lora_A." in n else 1) for n, v in tensors.items()}
    folder.mkdir()
    save_file(joined, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"r": rank, "lora_alpha": rank})
    )


def test_the_bits_are_those_of_a_file_of_the_summed_rank(case):
    engine, folder = case
    prompts = prompts_of(4, seed=21)
    write_cat(folder / "cat", {folder / name: weight for name, weight in WEIGHTS.items()})
    engine.load_adapter("cat", folder / "cat")
    want = [answer(output) for output in engine.generate(prompts, "cat", SCORED)]
    found = engine.generate(prompts, WEIGHTS, SCORED)
    assert [answer(output) for output in found] == want
    assert found[0].adapter == "a1*0.7+a3*-0.3"
    assert found[0].adapter_version is None
    names = [WEIGHTS, None, "a1", WEIGHTS, "a3", "cat"]
    together = engine.generate([prompts[0]] * 6, names, SCORED)
    alone = {n: answer(engine.generate([prompts[0]], n, SCORED)[0]) for n in (None, "a1", "a3")}
    for name, output in zip(names, together, strict=True):
        assert answer(output) == (alone[name] if name in (None, "a1", "a3") else want[0])
    engine.unload_adapter("cat")


def test_one_part_of_weight_1_keeps_its_bits_and_its_prefixes(case):
    engine, _ = case
    prompt = prompts_of(1, seed=22, low=30)[0]
    want = engine.generate([prompt], "a2", SCORED)[0]
    again = engine.generate([prompt], {"a2": 1}, SCORED)[0]
    assert answer(again) == answer(want)
    assert again.num_cached_tokens > 0
    half = engine.generate([prompt], {"a2": 0.5}, SCORED)[0]
    assert half.num_cached_tokens == 0
    assert answer(half) != answer(want)
    assert engine.generate([prompt], {"a2": 0.5}, SCORED)[0].num_cached_tokens > 0


def test_a_reload_of_a_part_is_a_new_sum(case):
    engine, folder = case
    prompt = prompts_of(1, seed=23)[0]
    engine.load_adapter("part", folder / "a1")
    want = answer(engine.generate([prompt], {"a1": 1.0, "a2": 2.0}, SCORED)[0])
    assert answer(engine.generate([prompt], {"part": 1.0, "a2": 2.0}, SCORED)[0]) == want
    engine.load_adapter("part", folder / "a0", replace=True)
    assert answer(engine.generate([prompt], {"part": 1.0, "a2": 2.0}, SCORED)[0]) != want
    engine.unload_adapter("part")
    with pytest.raises(KeyError, match="part"):
        engine.generate([prompt], {"part": 1.0, "a2": 2.0}, SCORED)


def test_many_sums_come_and_go(case):
    engine, _ = case
    prompts = prompts_of(20, seed=24)
    sums = [{"a0": 1 + n / 8, "a1": 0.5, "a2": -1.0} for n in range(20)]
    together = engine.generate(prompts, sums, SCORED)
    for n in (0, 7, 19):
        assert answer(engine.generate([prompts[n]], sums[n], SCORED)[0]) == answer(together[n])
    settle(engine)


def test_wrong_sums_are_refused_and_the_next_request_succeeds(case):
    engine, _ = case
    for wrong, named in (
        ({"a6": 1.0, "a7": 1.0}, "max_lora_rank=8"),  # ranks 7 and 8
        ({f"a{n}": 1.0 for n in range(5)}, "1 to 4 parts"),
        ({"a1": float("nan")}, "weight of 'a1'"),
        ({}, "1 to 4 parts"),
    ):
        with pytest.raises(ValueError, match=named):
            engine.generate("hello", wrong, SCORED)
    with pytest.raises(KeyError, match="nobody"):
        engine.generate("hello", {"a1": 1.0, "nobody": 1.0}, SCORED)
    assert engine.generate("hello", WEIGHTS, SCORED)


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("deepseek_v2", marks=pytest.mark.long)])
def test_lora_over_esft_has_the_bits_of_the_merged_model(kind, tmp_path):
    """LoRA on attention and on experts, the replaced ones included."""
    rng = np.random.default_rng(7)
    base, folder = tiny_esft.write_moe(tmp_path / "base", kind), tmp_path / "adapters"
    for seed, name in enumerate(("lora", "second")):
        tiny_esft.write_lora_adapter(folder / name, kind, 2, seed=50 + seed)
    chosen = [tiny_esft.random_choice(kind, rng) for _ in range(2)]
    made = [
        tiny_esft.write_esft_adapter(folder / f"e{n}", base, one, n) for n, one in enumerate(chosen)
    ]
    prompts = [rng.integers(4, 260, 9).tolist() for _ in range(3)]
    loras = {name: folder / name for name in ("lora", "second")}
    wanted = {"lora": 0.5, "second": 2.0}
    alone = {}
    for n, tensors in enumerate(made):
        merged = tiny_esft.write_merged(tmp_path / f"merged-{n}", base, tensors)
        with Engine(merged, loras, **SIZES) as oracle:
            for name, adapter in (("one", "lora"), ("two", wanted)):
                outputs = oracle.generate(prompts, adapter, SCORED)
                alone[n, name] = [answer(output) for output in outputs]
    sizes = SIZES | {"max_esft_adapters": 2}
    paths = {**loras, **{f"e{n}": folder / f"e{n}" for n in range(2)}}
    with Engine(base, paths, **sizes) as engine:
        asked = [(n, name) for name in ("one", "two") for n in range(2)]
        parts = {"one": {"lora": 1.0}, "two": wanted}
        names = [{**parts[name], f"e{n}": 1.0} for n, name in asked for _ in prompts]
        outputs = engine.generate(prompts * len(asked), names, SCORED)
        found = [answer(output) for output in outputs]
        assert found == [one for key in asked for one in alone[key]]
        alone_again = engine.generate(prompts, {"e1": 1.0, "lora": 1.0}, SCORED)
        assert [answer(output) for output in alone_again] == alone[1, "one"]
        with pytest.raises(ValueError, match="can only be 1"):
            engine.generate(prompts, {"lora": 1.0, "e0": 0.5}, SCORED)
        settle(engine)
        assert engine.stats().compilations_after_warmup == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    with make_engine(folder, SHAPES["llama"]) as engine:
        with client_of(create_app(engine, HttpSettings())) as client:
            yield engine, client
        settle(engine)


def ask(client: httpx.Client, adapters, **more):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body | {"adapters": adapters} | more)


def test_over_http(served):
    engine, client = served
    parts = [{"name": name, "weight": weight} for name, weight in WEIGHTS.items()]
    sampling = SCORED.__class__(max_tokens=5, temperature=0.0, ignore_eos=True)
    want = engine.generate([[5, 6, 7, 8]], WEIGHTS, sampling)[0].outputs[0].text
    answers = [ask(client, parts), ask(client, parts, model="model")]
    assert [one.json()["choices"][0]["text"] for one in answers] == [want, want]
    assert answers[0].json()["model"] == "model"
    assert "X-Adapter-Version" not in answers[0].headers
    one = ask(client, [{"name": "a1"}]).json()
    assert one["choices"] == ask(client, None, model="a1").json()["choices"]


BAD = [
    ([{"name": f"a{n}"} for n in range(5)], {}, 400, "1 to 4 parts"),
    ([{"name": "a1", "weight": "0.7"}], {}, 400, "weight of 'a1'"),
    ([{"name": "a1", "weight": None}], {}, 400, "weight of 'a1'"),
    ([{"name": "a6"}, {"name": "a7"}], {}, 400, "max_lora_rank=8"),
    ([{"name": "a1"}, {"name": "nobody"}], {}, 404, "`nobody`"),
    ([{"name": "a1"}, {"name": "../x"}], {}, 404, "`../x`"),
    ([{"name": "a1"}, {"name": "a2"}], {"model": "a3"}, 400, "put all parts into adapters"),
    ([{"name": "a1"}, {"name": "a2"}], {"lora_path": "a3"}, 400, "put all parts into adapters"),
    ([{"name": "model"}], {}, 400, "base model"),
    ([{"name": "a1", "scale": 2}], {}, 400, "'scale'"),
    ([], {}, 400, "1 to 4 parts"),
    ("a1", {}, 400, "adapters"),
]


@pytest.mark.parametrize(("parts", "more", "status", "named"), BAD, ids=range(len(BAD)))
def test_bad_sums_over_http(served, parts, more, status, named):
    answer = ask(served[1], parts, **more)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]
