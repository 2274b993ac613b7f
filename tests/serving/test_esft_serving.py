"""ESFT adapters in a running engine: every request gets the bits of its merged model.

The oracle is an engine without ESFT whose weights are exchanged for those of a merged checkpoint.
"""

import contextlib
import dataclasses
import json
import random
import time

import numpy as np
import pytest
import tiny_esft
from engine_cases import Listener

from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import OutOfPages
from lora_jax.models import load
from serving import Engine, FinishReason, RequestFailed, Sampling, esft_parts
from serving.engine_loop import EngineLoop
from serving.model_runner import ModelRunner

SIZES = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8,  # one program
    "block_size": 4,
    "max_lora_rank": 4,
    "max_loras": 2,
    "max_adapter_loads_per_minute": 1_000_000,
}
ADAPTERS, SLOTS = 10, 3
SCORED = Sampling(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
LONG = Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)


class FaultyMemory(HostMemory):
    """Gives only so many pages more, if `left` says so; `gate` is held while a page is made."""

    def __init__(self):
        super().__init__("none")  # a step that reads where no expert lies ends the process
        self.left: int | None = None
        self.why: Exception = OutOfPages("the device is full")

    def create_page(self, num_bytes):
        if self.left is not None:
            if self.left == 0:
                raise self.why
            self.left -= 1
        return super().create_page(num_bytes)


def runner_of(engine) -> ModelRunner:
    loop: EngineLoop = engine._parts.loop
    return loop._parts.runner


def leaves_of(folder):
    """Return a checkpoint's weights in the order of a runner's."""
    import jax
    from flax import nnx

    return tuple(jax.tree.leaves(nnx.split(load(folder)[0], graph=False)[1]))


def answer(output):
    first = output.outputs[0]
    return first.token_ids, first.logprobs, output.prompt_logprobs, first.finish_reason


class Case:
    """An engine, adapters e0 to e9 and a LoRA in its folder, and everybody's answers alone."""

    def __init__(self, root, kind, num_adapters=ADAPTERS):
        rng = np.random.default_rng(7)
        self.base, self.dir = tiny_esft.write_moe(root / "base", kind), root / "adapters"
        self.prompts = [rng.integers(4, 260, rng.integers(3, 9)).tolist() for _ in range(3)]
        self.names = [f"e{place}" for place in range(num_adapters)]
        tiny_esft.write_lora_adapter(self.dir / "lora", kind, 2, seed=50)
        folders: dict[str | None, object] = {None: self.base}
        for place, name in enumerate(self.names):
            chosen = tiny_esft.random_choice(kind, rng)
            made = tiny_esft.write_esft_adapter(self.dir / name, self.base, chosen, place)
            folders[name] = tiny_esft.write_merged(root / f"merged-{name}", self.base, made)
        options = {"max_esft_adapters": 0, "enable_prefix_caching": False}
        loras = {"lora": self.dir / "lora"}
        with Engine(self.base, loras, **SIZES, **options) as oracle:
            self.alone = {"lora": self.answers(oracle, "lora")}
            for name, folder in folders.items():
                runner_of(oracle)._leaves = leaves_of(folder)
                self.alone[name] = self.answers(oracle, None)
        assert len({str(found) for found in self.alone.values()}) == len(self.alone)
        self.memory = FaultyMemory()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(esft_parts, "for_platform", lambda platform: self.memory)
            self.engine = Engine(
                self.base, **SIZES, max_esft_adapters=SLOTS, lora_dir=str(self.dir), max_queue=4000
            )
        self.pages_at_start = self.pages()

    def answers(self, engine, name):
        return [answer(output) for output in engine.generate(self.prompts, name, SCORED)]

    def pages(self):
        stats = self.engine.stats()
        return stats.expert_page_bytes

    def check(self, names):
        """Ask for all these at once; everybody gets what they get alone."""
        asked = [(name, place) for name in names for place in range(len(self.prompts))]
        prompts = [self.prompts[place] for _, place in asked]
        outputs = self.engine.generate(prompts, [name for name, _ in asked], SCORED)
        for (name, place), output in zip(asked, outputs, strict=True):
            assert answer(output) == self.alone[name][place], (name, place)

    def unload_all(self):
        for entry in self.engine.registry.entries():
            self.engine.unload_adapter(entry.name)

    def check_nothing_is_left(self):
        self.unload_all()
        assert wait_until(lambda: self.pages() == self.pages_at_start), self.pages()
        assert wait_until(lambda: self.memory.usage().created == self.pages_at_start)
        assert wait_until(lambda: holds(self.engine.check_integrity))


def holds(check) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


def wait_until(condition, seconds=60.0):
    """Return whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def running(case):
    try:
        yield case
        assert case.engine.stats().compilations_after_warmup == 0
        assert case.engine.is_alive()
    finally:
        case.engine.close()
    assert case.memory.usage().created == 0


@pytest.fixture(scope="module", params=tiny_esft.KINDS)
def any_case(request, tmp_path_factory):
    if request.param == "qwen3_moe":
        yield request.getfixturevalue("case")
        return
    with running(Case(tmp_path_factory.mktemp(request.param), request.param, 4)) as case:
        yield case


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    with running(Case(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")) as case:
        yield case


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test(request):
    yield
    if "case" in request.fixturenames:
        request.getfixturevalue("case").memory.left = None


def test_every_request_has_the_bits_of_its_merged_model(any_case):
    """More adapters than slots, LoRA and base rows beside them."""
    for name in (any_case.names[0], None, "lora"):
        any_case.check([name])
    any_case.check([None, *any_case.names[:SLOTS], "lora", None])
    any_case.check(["lora", *any_case.names, None])
    any_case.check_nothing_is_left()


def churn(case, rounds, seed):
    """Load, unload and exchange adapters in random order while requests for them run.

    Returns the names of all that were asked for.
    """
    rng, asked = random.Random(seed), []

    def ask(name, of):
        place = rng.randrange(len(case.prompts))
        listener = Listener()
        case.engine.submit(case.prompts[place], name, SCORED, on_output=listener)
        asked.append((of, place, listener))

    live = None
    for _ in range(rounds):
        name = rng.choice(case.names)
        loaded = {entry.name for entry in case.engine.registry.entries()}
        for other in rng.sample(["lora", None, name], 2):
            ask(other, other)  # e0 to e9 and the LoRA are read from the folder on first use
        if rng.random() < 0.5 and loaded:
            case.engine.unload_adapter(rng.choice(sorted(loaded)))
            live = live if "live" in {e.name for e in case.engine.registry.entries()} else None
        if rng.random() < 0.3:
            live = rng.choice(case.names)
            case.engine.load_adapter("live", case.dir / live, replace=True)
        if live is not None:
            ask("live", live)
        if rng.random() < 0.3:
            asked[rng.randrange(len(asked))][2].finished.wait(60)
    for of, place, listener in asked:
        assert listener.wait().finish_reason is FinishReason.LENGTH, listener.deltas[-1]
        tokens = tuple(token for delta in listener.deltas for token in delta.token_ids)
        logprobs = tuple(entry for delta in listener.deltas for entry in delta.logprobs)
        assert (tokens, logprobs) == case.alone[of][place][:2], of
    return {of for of, _, _ in asked} - {None}


def test_ten_adapters_come_and_go_in_random_order_under_traffic(any_case):
    before = any_case.engine.stats().adapter_swaps
    asked = churn(any_case, 40, seed=1)
    assert len(asked) > 4
    assert any_case.engine.stats().adapter_swaps - before >= len(asked)
    any_case.check_nothing_is_left()


@pytest.mark.slow
def test_a_thousand_cycles_leave_nothing_behind(case):
    before = case.engine.stats().adapter_swaps
    while case.engine.stats().adapter_swaps - before < 1000:
        churn(case, 100, seed=case.engine.stats().adapter_swaps)
    case.check_nothing_is_left()


def test_a_reload_is_new_at_once_and_old_requests_finish_on_the_old(case):
    engine, prompt = case.engine, case.prompts[0]
    engine.load_adapter("live", case.dir / "e0")
    want = engine.generate([prompt], "e0", LONG)[0].outputs[0].token_ids
    old = Listener()
    engine.submit(prompt, "live", LONG, on_output=old)
    assert wait_until(lambda: bool(old.deltas))
    engine.load_adapter("live", case.dir / "e1", replace=True)
    renewed = engine.generate([prompt], "live", SCORED)[0]
    assert answer(renewed) == case.alone["e1"][0]
    assert renewed.num_cached_tokens == 0
    old.wait()
    assert tuple(token for delta in old.deltas for token in delta.token_ids) == want
    case.check_nothing_is_left()


def test_info_names_the_kind_and_the_experts(case):
    case.check(["e3", "lora"])
    infos = {info.name: info for info in case.engine.adapters()}
    assert {name: info.kind for name, info in infos.items()} == {"e3": "esft", "lora": "lora"}
    info, config = infos["e3"], json.loads((case.dir / "e3" / "expert_cfg.json").read_text())
    assert (info.rank, info.resident) == (0, True)
    assert info.report.experts == {int(n): tuple(ids) for n, ids in config["experts"].items()}
    stats = case.engine.stats()
    assert stats.adapter_bytes["esft"] == info.bytes
    assert stats.adapter_slots_total == SLOTS + SIZES["max_loras"]
    assert set(stats.resident_adapters) == {"e3", "lora"}
    assert stats.expert_page_bytes > case.pages_at_start
    value = case.engine.metrics.registry.get_sample_value
    assert value("lora_jax:adapter_bytes", {"kind": "esft"}) == info.bytes
    assert value("lora_jax:expert_page_bytes") == stats.expert_page_bytes
    case.check_nothing_is_left()


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_load_without_memory_fails_its_requests_and_nothing_else(case, pages):
    """Nothing else is on the device, so that nothing could make room."""
    case.check_nothing_is_left()
    case.memory.left = pages
    with pytest.raises(RequestFailed, match="'e4' could not be loaded: the device is") as caught:
        case.engine.generate([case.prompts[0]], "e4", SCORED)
    assert caught.value.retryable
    case.check([None])
    assert wait_until(lambda: case.pages() == case.pages_at_start)
    case.memory.left = None
    case.check(["e4", None])  # as soon as there is memory
    case.check_nothing_is_left()


def test_a_driver_s_error_in_the_middle_of_a_load_leaves_the_others_serving(case):
    case.check(["e5"])
    before = case.pages()
    case.memory.left, case.memory.why = 1, RuntimeError("the driver is confused")
    try:
        with pytest.raises(RequestFailed, match="'e6' could not be loaded: the driver is confused"):
            case.engine.generate([case.prompts[0]], "e6", SCORED)
        case.check([None, "e5"])
        assert wait_until(lambda: case.pages() == before)
    finally:
        case.memory.why = OutOfPages("the device is full")
    case.memory.left = None
    case.check(["e6", "e5"])
    case.check_nothing_is_left()


def test_idle_adapters_make_room_and_those_in_use_are_waited_for(case):
    engine = case.engine
    case.check(["e0", "e1"])
    case.memory.left = 0
    case.check(["e2"])  # on the pages of one that nobody uses
    case.check_nothing_is_left()
    case.memory.left = None
    user, waiter = Listener(), Listener()
    endless = dataclasses.replace(LONG, max_tokens=55)
    user_id = engine.submit(case.prompts[0][:3], "e7", endless, on_output=user)
    assert wait_until(lambda: bool(user.deltas))
    case.memory.left = 0
    engine.submit(case.prompts[1], "e8", SCORED, on_output=waiter)
    engine.abort(user_id)  # or it has ended by itself: its pages are what the other waits for
    assert waiter.wait().finish_reason is FinishReason.LENGTH
    tokens = tuple(token for delta in waiter.deltas for token in delta.token_ids)
    assert tokens == case.alone["e8"][1][0]
    case.check_nothing_is_left()


def test_what_can_never_run_is_refused_and_nothing_changes(case):
    engine = case.engine
    folder = case.dir.parent / "wide"
    tiny_esft.write_esft_adapter(folder, case.base, {0: range(6)}, 1)
    before = engine.registry.generation
    config = json.loads((folder / "expert_cfg.json").read_text())
    config["experts"] = {"0": [0, 1, 2, 3, 4, 5, 6]}
    (folder / "expert_cfg.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"Adapter 'wide': expert_cfg\.json: .* names expert 6"):
        engine.load_adapter("wide", folder)
    assert engine.registry.generation == before
    assert case.pages() == case.pages_at_start
    case.check([None])
