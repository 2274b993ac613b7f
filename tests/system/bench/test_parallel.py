"""The bench of models over several devices: its files and comparisons; on GPUs its figures."""

import dataclasses
import json
import threading

import jax
import pytest
from safetensors import safe_open
from support.drivers.scheduler_driver import Driver, limits

from bench.parallel import bits, exchange, graphs, host, served, shapes, steps
from bench.parallel.__main__ import parse
from bench.parallel.quiet import Quiet
from bench.thunks import read_thunks
from lora_jax.config import from_hf
from lora_jax.config.split_sizes import check_divides
from serving.engine.parts.devices import make_cpu_devices


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("name", "experts"), [("moe", "ep"), ("moe", "tp"), ("dense", "ep")])
def test_small_models_have_parts_that_a_gpu_takes(name, experts, devices):
    check_divides(from_hf(shapes.SMALL[name]), devices, experts, unit=64)


@pytest.mark.parametrize("name", shapes.SPEED)
def test_real_shapes_have_them_too(name):
    config = from_hf(shapes.SPEED[name])
    for devices in (2, 4):
        check_divides(config, devices, "ep" if config.moe else "tp", unit=64)


def test_an_esft_adapter_has_the_matrices_of_its_experts(tmp_path):
    raw = shapes.SMALL_MOE | {"hidden_size": 8, "moe_intermediate_size": 4}
    folder = shapes.write_esft(tmp_path / "e", raw, {0: [1, 5], 3: [2]}, seed=0)
    with safe_open(tmp_path / "e" / "model.safetensors", "numpy") as file:
        assert len(file.keys()) == 9
        assert file.get_slice("model.layers.3.mlp.experts.2.down_proj.weight").get_shape() == [8, 4]
    said = json.loads((tmp_path / "e" / "expert_cfg.json").read_text())
    assert said["experts"] == {"0": [1, 5], "3": [2]}
    assert folder == str(tmp_path / "e")


def test_a_token_and_a_bit_that_differ_are_counted():
    answers = [((1, 2, 3), (0.5,), "length", ()), ((4, 5), (0.25,), "length", ())]
    one = bits.Run(answers, {})
    assert bits.compare(one, one) == {
        "equal": True,
        "answers": 2,
        "equal_answers": 2,
        "tokens": 5,
        "equal_tokens": 5,
        "first_unequal": [],
    }
    other = dataclasses.replace(one, answers=[((1, 9, 3), *answers[0][1:]), answers[1]])
    found = bits.compare(one, other)
    assert (found["equal"], found["equal_answers"], found["equal_tokens"]) == (False, 1, 4)
    colder = dataclasses.replace(one, answers=[answers[0], ((4, 5), (0.24,), "length", ())])
    assert bits.compare(one, colder) | {"equal": False} == bits.compare(one, colder)
    assert found["first_unequal"] == [1]
    assert bits.compare(one, colder)["first_unequal"] == [-1]


def test_who_measures_is_alone(tmp_path):
    quiet, order = Quiet(tmp_path / "lock"), []
    with quiet.busy():
        waiting = threading.Thread(target=lambda: _measure(quiet, order))
        waiting.start()
        with quiet.busy():
            order.append("busy")
        waiting.join(0.2)
        assert order == ["busy"]
    waiting.join(20)
    assert order == ["busy", "alone"]
    with Quiet(None).alone(), Quiet(None).alone():
        pass
    hurried = Quiet(tmp_path / "lock", patience_s=0.1)
    with quiet.busy(), hurried.alone():
        assert not hurried.was_alone
    assert quiet.was_alone


def _measure(quiet, order):
    with quiet.alone():
        order.append("alone")


@pytest.mark.parametrize(("rows", "prompt", "budget"), [(8, 16, 16), (6, 12, 9), (4, 4, 32)])
def test_longer_answers_are_more_steps_of_all_rows_and_no_prompt(rows, prompt, budget):
    few, plans = served.fewest_tokens(rows, prompt, budget), []
    for tokens in (few, few + 8):
        wide = limits(max_num_seqs=rows, max_num_batched_tokens=budget, max_logit_rows=rows)
        driver = Driver(dataclasses.replace(wide, num_pages=40 * rows, max_model_len=160))
        for row in range(rows):
            driver.add([1 + row] * prompt, max_tokens=tokens, ignore_eos=True)
        driver.run()
        plans.append(driver.plans)
    assert len(plans[1]) - len(plans[0]) == 8
    decoding = [sum(plan.num_tokens == len(plan.chunks) == rows for plan in some) for some in plans]
    assert decoding[1] - decoding[0] == 8


@pytest.mark.parametrize("devices", [2, 3, 4, 6])
def test_results_are_of_equal_parts_for_any_number_of_devices(devices):
    for kilobytes in exchange.KILOBYTES:
        columns = exchange.columns_of(kilobytes, devices)
        assert columns % (devices * exchange.UNIT) == 0
        assert 0.8 < columns * exchange.ROWS * 2 / 1024 / kilobytes <= 1


def test_thunks_of_a_dump(tmp_path):
    text = "000: kCommandBuffer x\n  000: kFusion a\n  001: kCustomCall b\n001: kCopy c\n"
    (tmp_path / "m.thunk_sequence.txt").write_text(text)
    assert read_thunks(tmp_path) == (["kCommandBuffer", "kCopy"], 2)


@pytest.mark.long
def test_a_part_of_one_number_of_devices_refuses_several(capsys):
    given = ["--out", "results", "--devices", "1", "2"]
    assert parse(["bits", *given]).devices == [1, 2]
    with pytest.raises(SystemExit):
        parse(["steps", *given])
    assert "--devices takes one number for steps, got 1 2" in capsys.readouterr().err


def test_steps_of_a_tiny_model_draw_the_same_tokens_on_two_devices():
    make_cpu_devices(2)
    raw = shapes.tiny(shapes.QWEN3_30B)
    sizes = steps.Sizes(rows=4, position=10, prompts=2, prompt=8)
    found = [steps.measure(raw, n, None, sizes, Quiet(None)) for n in (1, 2)]
    for tokens in ("base_tokens", "prompt_tokens"):
        assert len({row[tokens] for row in found}) == 1
    assert all(ms > 0 for row in found for ms in row["ms"].values())


@pytest.mark.long
def test_the_hosts_part_is_of_as_many_arrays_on_any_number_of_devices():
    make_cpu_devices(2)
    raw = shapes.tiny(shapes.QWEN3_30B)
    one, two = host.measure(raw, [1, 2], steps.Sizes(rows=4, position=10))
    for row in (one, two):
        assert 0 < row["thread_us"] <= row["median_us"][0]
        assert 0 <= row["launch_us"] <= row["median_us"][1]
    # K and V pages of two layers, the history, samples.
    assert one["results"] == two["results"] == 2 * 2 + 1 + 5
    assert one["arguments"] <= two["arguments"]


def _gpus() -> list[int]:
    """Return the numbers of devices to try."""
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    return [size for size in (2, 4) if size <= len(jax.devices())]


@pytest.mark.parametrize("sizes", [bits.Sizes(), bits.LONG], ids=["short", "long"])
def test_pages_hold_the_longest_prompt_and_its_answer(sizes):
    assert sizes.longest + bits.ANSWER < sizes.model_len <= sizes.pages * bits.PAGE


@pytest.mark.long
def test_cpus_answer_with_the_bits_of_one(tmp_path):
    make_cpu_devices(2)
    raw = shapes.tiny(shapes.SMALL["dense"])
    (row,) = bits.measure("dense", [2], tmp_path, raw, Quiet(None))["rows"]
    assert row["equal"], row
    assert row["preemptions"]


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", shapes.SMALL)
def test_gpus_answer_with_the_bits_of_one(kind, tmp_path):
    found = bits.measure(kind, _gpus(), tmp_path, shapes.SMALL[kind], Quiet(None))
    for row in found["rows"]:
        assert row["equal"], row
        assert row["compilations_after_warmup"] == 0
        assert row["all_gather"] == ["cuda"]
        assert row["preemptions"]


@pytest.mark.multigpu
def test_a_decode_step_is_one_graph_on_each_gpu_and_faster():
    """Measured on two H200: 1.47 and 1.41 times in parts, 1.37 and 1.35 with whole experts."""
    raw, sizes = shapes.QWEN3_30B | {"num_hidden_layers": 12}, steps.Sizes(prompts=0)
    one = steps.measure(raw, 1, None, sizes, Quiet(None))
    for size in _gpus():
        for expert_parallel in (True, False):
            rows = graphs.measure(raw, size, expert_parallel, sizes)["rows"].values()
            assert all(row["thunks"] == {"kCommandBuffer": 1} for row in rows)
            several = steps.measure(raw, size, expert_parallel, sizes, Quiet(None))
            assert several["base_tokens"] == one["base_tokens"]
            for name, ms in several["ms"].items():
                assert one["ms"][name] > 1.2 * ms, name
