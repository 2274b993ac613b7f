"""Scheduler and model runner as a config asks for them."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from support.cases.engine_cases import GREEDY, SHAPES, make_engine

from serving.api.config import EngineConfig
from serving.api.request import Request
from serving.api.sampling import Sampling
from serving.engine.memory.sizing import CacheSize
from serving.engine.parts import step_parts
from serving.engine.parts.step_parts import logit_rows, make_scheduler
from serving.steps.model_runner import ModelRunner


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_the_scheduler_keeps_the_limits_of_config_and_cache():
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "mixed_step_tokens": 4}
    config = EngineConfig("m", **sizes, max_queue=3, seed=7)
    size = CacheSize(num_pages=6, page_size=4, max_model_len=12)
    scheduler = make_scheduler(config, size, None, (2,), 5, num_logit_rows=64)
    limits = scheduler.limits
    assert (limits.num_pages, limits.page_size, limits.max_model_len) == (6, 4, 12)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_queue) == (2, 8, 3)
    assert (limits.num_encoder_rows, limits.mixed_step_tokens) == (5, 4)
    times = {"arrival_s": 0.0, "deadline_s": 0.0}
    (one,) = scheduler.add(Request("a", (3,) * 10, Sampling(), None, "", print, **times))
    (two,) = make_scheduler(config, size, None, (2,), 5, num_logit_rows=64).add(one.request)
    assert one.seed == two.seed  # the config's
    assert [chunk.num_tokens for chunk in scheduler.plan(0.0).chunks] == [8]


def base_of(modules, *, is_shared):
    """A model that is loaded, as far as steps are kept by it."""
    catalogue, source = SimpleNamespace(module_names=modules), SimpleNamespace(is_shared=is_shared)
    none = dict.fromkeys(("split", "remote", "esft", "pool"))
    return SimpleNamespace(catalogue=catalogue, source=source, **none)


def test_steps_are_kept_by_the_modules_that_adapters_change(monkeypatch, tmp_path):
    """A config may leave them to the adapters: other adapters have other programs."""
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(str(tmp_path), lora_target_modules=["auto"])
    monkeypatch.setattr(step_parts, "step_files", lambda: ("steps", "programs"))

    def kept(*modules):
        return step_parts._kept_steps(config, base_of(modules, is_shared=False)).identity

    assert kept("q_proj", "v_proj") == kept("q_proj", "v_proj") != kept("k_proj", "o_proj")


def test_steps_are_found_again_where_only_the_host_is_told_something_else(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(step_parts, "step_files", lambda: ("steps", "programs"))

    def kept(**given):
        base = base_of(("q_proj",), is_shared=False)
        return step_parts._kept_steps(EngineConfig(str(tmp_path), **given), base).identity

    (folder := tmp_path / "adapters").mkdir()
    assert kept() == kept(seed=1, lora_dir=str(folder), max_queue=8, max_cpu_loras=3)
    assert kept() != kept(max_num_seqs=4)


def test_a_step_without_room_says_what_to_change():
    def warm_up(**given):
        raise jax.errors.JaxRuntimeError(said)

    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.02GiB."
    with pytest.raises(ValueError, match=r"Lower gpu_memory_utilization or .* 1\.02GiB"):
        step_parts._warm_up(SimpleNamespace(warm_up=warm_up), None, print)
    said = "INTERNAL: another"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"):
        step_parts._warm_up(SimpleNamespace(warm_up=warm_up), None, print)


@pytest.mark.parametrize(
    ("backend", "shares_device", "num_seqs", "rows"),
    [
        ("gpu", True, 8, 12),
        ("gpu", True, 100, 100),
        ("gpu", False, 8, 64),
        ("cpu", True, 8, 64),
    ],
)
def test_functions_of_a_gpu_compute_few_logits_in_a_step(
    backend, shares_device, num_seqs, rows, monkeypatch
):
    """Each has memory of its own for them; a server scores prompts in as few steps as it can."""
    monkeypatch.setattr(step_parts.jax, "default_backend", lambda: backend)
    config = EngineConfig("m", max_num_seqs=num_seqs)
    assert logit_rows(config, shares_device=shares_device) == rows


@pytest.mark.parametrize(
    ("backend", "is_function", "is_lazy"),
    [("gpu", False, False), ("gpu", True, True), ("cpu", False, True)],
)
def test_a_gpu_server_is_ready_when_all_kept_programs_are_read(
    backend, is_function, is_lazy, monkeypatch
):
    monkeypatch.setattr(step_parts.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(step_parts, "step_files", lambda: ("steps", "programs"))
    monkeypatch.setattr(step_parts, "identity", lambda fields, model: "code")
    base = base_of((), is_shared=is_function)
    kept = step_parts._kept_steps(EngineConfig("m"), base)
    assert kept is not None
    assert (kept.lazy, kept.anew) == (is_lazy, is_function)


@pytest.mark.slow  # ahead-of-time compiling shows the programs; this compiles them all
def test_steps_without_lora_have_their_own_programs_on_accelerators(tmp_path, monkeypatch):
    """The same tokens, whether a batch's adapters' kernels are in the program or not."""
    used = []

    class Specialized(ModelRunner):
        def __init__(self, base, sizes, choice, *args, **kwargs):
            choice = dataclasses.replace(choice, base_only=True)
            super().__init__(base, sizes, choice, *args, **kwargs)

        def _run(self, table, program, number=0):
            used.append((program.bucket, program.lora))
            return super()._run(table, program, number)

    batches = [[None] * 3, ["a1", None, "a7"], [None], ["a2"]]
    prompts = [[5, 6, 7], list(range(4, 24)), [9]]
    for name in ("usual", "own"):
        (tmp_path / name).mkdir()
    with make_engine(tmp_path / "usual", SHAPES["mixtral"]) as engine:
        want = [tokens(engine.generate(prompts[: len(b)], b, GREEDY)) for b in batches]
    monkeypatch.setattr(step_parts, "ModelRunner", Specialized)
    with make_engine(tmp_path / "own", SHAPES["mixtral"]) as engine:
        assert set(used) == {(b, lora) for b in (8, 32) for lora in (True, False)}
        for names, wanted in zip(batches, want, strict=True):
            used.clear()
            assert tokens(engine.generate(prompts[: len(names)], names, GREEDY)) == wanted
            assert any(not lora for _, lora in used) == (names.count(None) == len(names))
        assert engine.stats().compilations_after_warmup == 0
