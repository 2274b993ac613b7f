"""ESFT adapters in a running engine: every request gets the bits of its merged model.

Most tests use the shipped model with its ten trained adapters, others random models. On a GPU a
request gets the tokens: sums there may depend on the size of a step.
"""

import dataclasses
import gc
import json
import os
import shutil
from pathlib import Path

import jax
import pytest
from support.cases.engine_cases import Listener
from support.cases.esft_cases import (
    LONG,
    SCORED,
    SIZES,
    SLOTS,
    FaultyMemory,
    answer,
    churn,
    random_case,
    resident_bytes,
    running,
    shipped_case,
)
from support.waiting import wait_until

from lora_jax.memory.virtual import OutOfPages
from serving import FinishReason, RequestFailed

SHIPPED = Path(__file__).parents[3] / "assets" / "tiny-moe"


@pytest.fixture(
    scope="module",
    params=(
        pytest.param("mixtral", marks=pytest.mark.long),
        pytest.param("deepseek_v2", marks=pytest.mark.long),
        "shipped",
    ),
)
def any_case(request, tmp_path_factory):
    if request.param == "shipped":
        yield request.getfixturevalue("case")
        return
    root = tmp_path_factory.mktemp(request.param)
    with running(random_case(root, request.param, 4, memory=FaultyMemory())) as case:
        yield case


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    options = {"dtype": "float32", "memory": FaultyMemory(), "max_loras": SIZES["max_loras"]}
    with running(shipped_case(tmp_path_factory.mktemp("shipped"), SHIPPED, **options)) as case:
        yield case


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test(request):
    yield
    if "case" in request.fixturenames:
        request.getfixturevalue("case").memory.left = None


def test_every_request_has_the_bits_of_its_merged_model(any_case):
    """More adapters than slots, LoRA and base rows beside them."""
    for name in (any_case.names[0], None, any_case.loras[0]):
        any_case.check([name])
    any_case.check([None, *any_case.names[:SLOTS], any_case.loras[0], None])
    any_case.check([*any_case.loras, *any_case.names, None])
    any_case.check_nothing_is_left()


def test_adapters_come_and_go_in_random_order_under_traffic(any_case):
    before = any_case.engine.stats().adapter_swaps
    asked = churn(any_case, 40, seed=1)
    assert asked == {*any_case.names, *any_case.loras}
    assert any_case.engine.stats().adapter_swaps - before >= len(asked)
    any_case.check_nothing_is_left()


@pytest.mark.slow
def test_a_thousand_cycles_leave_nothing_behind(case):
    """Under traffic; the process grows by no file and no memory once a hundred have been."""

    def cycle(count):
        before = case.engine.stats().adapter_swaps
        while (swaps := case.engine.stats().adapter_swaps) - before < count:
            churn(case, 100, seed=swaps)
        case.check_nothing_is_left()
        gc.collect()
        return len(os.listdir("/proc/self/fd")), resident_bytes()

    files, resident = cycle(100)
    files_after, resident_after = cycle(1000)
    assert files_after == files
    assert resident_after - resident < 32 << 20


def test_a_reload_is_new_at_once_and_old_requests_finish_on_the_old(case):
    engine, prompt = case.engine, case.prompts[0]
    first, second = case.names[:2]
    engine.load_adapter("live", case.dir / first)
    want = engine.generate([prompt], first, LONG)[0].outputs[0].token_ids
    old = Listener()
    engine.submit(prompt, "live", LONG, on_output=old)
    wait_until(lambda: bool(old.deltas))
    engine.load_adapter("live", case.dir / second, replace=True)
    renewed = engine.generate([prompt], "live", SCORED)[0]
    assert answer(renewed) == case.alone[second][0]
    assert renewed.num_cached_tokens == 0
    old.wait()
    assert tuple(token for delta in old.deltas for token in delta.token_ids) == want
    case.check_nothing_is_left()


def test_info_names_the_kind_and_the_experts(case):
    name, lora = case.names[3], case.loras[0]
    case.check([name, lora])
    infos = {info.name: info for info in case.engine.adapters()}
    assert {name: info.kind for name, info in infos.items()} == {name: "esft", lora: "lora"}
    info, config = infos[name], json.loads((case.dir / name / "expert_cfg.json").read_text())
    assert (info.rank, info.resident) == (0, True)
    chosen = {int(layer): tuple(sorted(ids)) for layer, ids in config["experts"].items()}
    assert info.report.experts == chosen
    stats = case.engine.stats()
    assert stats.adapter_bytes["esft"] == info.bytes
    assert stats.adapter_slots_total == SLOTS + SIZES["max_loras"]
    assert set(stats.resident_adapters) == {name, lora}
    assert stats.expert_page_bytes > case.pages_at_start
    value = case.engine.metrics.registry.get_sample_value
    assert value("lora_jax:adapter_bytes", {"kind": "esft"}) == info.bytes
    assert value("lora_jax:expert_page_bytes") == stats.expert_page_bytes
    case.check_nothing_is_left()


@pytest.mark.parametrize("pages", [0, 4, 25])
def test_a_load_without_memory_fails_its_requests_and_nothing_else(case, pages):
    """At once, in the second tensor or in the third layer; there is nobody who could make room."""
    case.check_nothing_is_left()
    case.memory.left, name = pages, case.names[4]
    said = f"'{name}' could not be loaded: the device is"
    with pytest.raises(RequestFailed, match=said) as caught:
        case.engine.generate([case.prompts[0]], name, SCORED)
    assert caught.value.retryable
    case.check([None])
    wait_until(lambda: case.pages() == case.pages_at_start)
    case.memory.left = None
    case.check([name, None])  # as soon as there is memory
    case.check_nothing_is_left()


def test_a_driver_s_error_in_the_middle_of_a_load_leaves_the_others_serving(case):
    there, other = case.names[5:7]
    case.check([there])
    before = case.pages()
    case.memory.left, case.memory.why = 1, RuntimeError("the driver is confused")
    try:
        said = f"'{other}' could not be loaded: the driver is confused"
        with pytest.raises(RequestFailed, match=said):
            case.engine.generate([case.prompts[0]], other, SCORED)
        case.check([None, there])
        wait_until(lambda: case.pages() == before)
    finally:
        case.memory.why = OutOfPages("the device is full")
    case.memory.left = None
    case.check([other, there])
    case.check_nothing_is_left()


def test_idle_adapters_make_room_and_those_in_use_are_waited_for(case):
    engine = case.engine
    small, large = "gate-law", "token-summary"  # 7 and 12 experts
    case.check([large, "token-intent"])
    case.memory.left = 0
    case.check([small])  # on the pages of one that nobody uses
    case.check_nothing_is_left()
    case.memory.left = None
    user, waiter = Listener(), Listener()
    endless = dataclasses.replace(LONG, max_tokens=55)
    user_id = engine.submit(case.prompts[0][:3], large, endless, on_output=user)
    wait_until(lambda: bool(user.deltas))
    case.memory.left = 0
    engine.submit(case.prompts[1], small, SCORED, on_output=waiter)
    engine.abort(user_id)  # or it has ended by itself: its pages are what the other waits for
    assert waiter.wait().finish_reason is FinishReason.LENGTH
    tokens = tuple(token for delta in waiter.deltas for token in delta.token_ids)
    assert tokens == case.alone[small][1][0]
    case.check_nothing_is_left()


def test_what_can_never_run_is_refused_and_nothing_changes(case, tmp_path):
    engine = case.engine
    folder = tmp_path / "wide"
    shutil.copytree(case.dir / case.names[0], folder)
    before = engine.registry.generation
    config = json.loads((folder / "expert_cfg.json").read_text())
    config["experts"]["0"].append(8)
    (folder / "expert_cfg.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"Adapter 'wide': expert_cfg\.json: .* names expert 8"):
        engine.load_adapter("wide", folder)
    assert engine.registry.generation == before
    assert case.pages() == case.pages_at_start
    case.check([None])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", ["shipped", "wide"])
def test_on_a_gpu_adapters_come_and_go_with_the_tokens_of_their_merged_models(
    model, dtype, tmp_path
):
    """The experts of `wide` are 1/4 or 1/2 page."""
    assert jax.default_backend() == "gpu"
    options = {"dtype": dtype, "exact": False, "block_size": 16}
    if model == "shipped":
        case = shipped_case(tmp_path, SHIPPED, **options)
    else:
        case = random_case(tmp_path, "qwen3_moe", 5, hidden=256, width=1024, **options)
    with running(case):
        case.check([None, *case.names[:SLOTS], *case.loras])
        case.check([*case.loras, *case.names, None])
        before = case.engine.stats().adapter_swaps
        asked = churn(case, 60, seed=1)
        assert asked == {*case.names, *case.loras}
        assert case.engine.stats().adapter_swaps - before >= len(asked)
        used = case.memory.usage().device_used
        case.check_nothing_is_left()
        assert used is not None
        assert case.memory.usage().device_used <= used
