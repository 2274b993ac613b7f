"""Shapes and times of bench.vision: folders that the engine's readers take, floors by hand."""

import contextlib
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench.vision import applications, device, plots, shapes, task_heads
from lora_jax.finetune.pictures import make_adapters, tasks
from lora_jax.models.loader import read_config

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
}


@pytest.mark.parametrize("name", shapes.TEXTS)
def test_a_shape_is_read_as_its_family(tmp_path, name):
    config = read_config(shapes.write_shape(tmp_path / name, name))
    assert config.num_layers == shapes.TEXTS[name]["num_hidden_layers"]
    assert config.tower.out_size == config.hidden_size
    image = device.prepared(tmp_path / name, (96, 640))
    assert image.grid[0] * image.grid[1] == 4 * image.num_tokens


def test_floors_are_those_of_the_products():
    """A tower of one patch row by hand: maps, scores and values, mergers, embedding."""
    size, width, out, patches = 1152, 4304, 2048, 8
    block = patches * (4 * size * size + 2 * size * width) + 2 * patches * patches * size
    mergers = 4 * 2 * ((4 * size) ** 2 + 4 * size * out)
    want = 2 * (27 * block + mergers + patches * 1536 * size)
    assert shapes.tower_flops(patches, out) == want


@pytest.mark.long
def test_slots_lay_every_map_s_rows_apart():
    slots = device._slots(3, (64, 16, 16, 64), 64, 4)
    entries = np.asarray(slots.entries)
    for column, widths in ((0, [64] * 4), (1, [64, 16, 16, 64])):
        used: dict[int, list[int]] = {64: [], 16: []}
        for module, width in enumerate(widths):
            used[width] += entries[module, :, :, column].ravel().tolist()
        assert all(len(set(starts)) == len(starts) for starts in used.values())
    assert slots.scaling.dtype == jnp.float32


def test_jobs_follow_from_seed_rate_and_skew():
    jobs = applications.retrieval_jobs(400, 4.0, 0.6)
    assert jobs == applications.retrieval_jobs(400, 4.0, 0.6)
    assert 85 < jobs[-1].at < 115, "400 requests at 4 a second"
    assert 0.5 < sum(job.adapter == "a0" for job in jobs) / 400 < 0.7
    assert len({job.seed for job in jobs}) == 400, "each has images of its own"
    chunks = applications.analytics_jobs(5, 3, 0.6)
    assert [job.at for job in chunks] == sorted(job.at for job in chunks)
    assert len({job.seed for job in chunks}) == 15
    assert sum(job.adapter == "a0" for job in chunks) == 9


def test_cases_cover_every_sweep_once():
    found = applications.cases(4, 2, 2.0, 0.6, (1.0, 4.0), (1, 3), (0.5, 0.9))
    points = [(case.sweep, case.value) for case in found]
    assert len(set(points)) == len(points)
    assert {sweep for sweep, _ in points} == {panel[0] for panel in plots.PANELS}
    for case in found:
        others = sum(job.adapter != "a0" for job in case.jobs)
        assert case.sweep != "others" or (others, len(case.jobs)) == (case.value, 8)
        names = {job.adapter for job in case.jobs}
        assert case.sweep != "two adapters" or names <= {"a0", "a1"}


def test_latency_is_from_arrival_to_the_end():
    """A clock that the answers move: each takes one second."""
    now = [0.0]

    def ask(job):
        now[0] += 1.0

    jobs = [applications.Job(0.0, "a0", n) for n in range(3)]
    assert sorted(applications.latencies(ask, jobs[:1], lambda: now[0])) == [1.0]
    found = applications.latencies(ask, jobs, lambda: now[0])
    assert 1.0 <= min(found) <= max(found) <= 3.0


def test_only_a_switch_is_slowed(monkeypatch):
    slept = []
    monkeypatch.setattr(applications.time, "sleep", slept.append)

    class Merged:
        num_switches = num_waits = 0

        def _follow(self, switches):
            self.num_switches += switches

        def wait(self):
            self.num_waits += 1

    merged = Merged()
    applications.slow_switches(merged, 10.0)
    merged._follow(0)
    assert (slept, merged.num_waits) == ([], 0)
    merged._follow(1)
    assert (len(slept), merged.num_waits) == (1, 1)  # what is slowed is the whole switch


def test_frames_tell_the_tower_s_share_of_the_first_token(tmp_path, monkeypatch):
    """A request takes 100 ms and 10 a token, the tower 30 an image, at half of its peak."""
    now, watch = [0.0], types.SimpleNamespace(seconds=0.0, settle=lambda: None)

    def generate(prompts, adapter, sampling, images):
        assert all(len(mine) == 1 for mine in images)
        now[0] += 0.1 + 0.01 * sampling.max_tokens
        watch.seconds += 0.03 * len(prompts)

    engine = types.SimpleNamespace(generate=generate, _parts=None)
    runner = types.SimpleNamespace(encoder=types.SimpleNamespace(stopwatch=watch))
    parts = types.SimpleNamespace(runner=runner)
    engine._parts = types.SimpleNamespace(loop=types.SimpleNamespace(_parts=parts))
    monkeypatch.setattr(device, "engine_of", lambda *a, **k: contextlib.nullcontext(engine))
    monkeypatch.setattr(device, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    model = shapes.write_shape(tmp_path / "m", "qwen3-vl-30b-a3b")
    peak = shapes.tower_flops(16 * 16, 2048) / 0.015  # 256 x 256 pixels
    monkeypatch.setattr(device, "of_device", lambda table: peak)
    found = device.frames(model, (256, 256))
    assert (found["ttft_ms"], found["tpot_ms"], found["tokens_per_s"]) == (110, 10, 345.9)
    assert (found["tower_ms"], found["tower_ms_of_several"]) == (30, 30)
    assert (found["tower_share_of_ttft"], found["tower_share_of_peak"]) == (0.273, 0.5)
    assert found["tower_floor_ms"] == 15


def test_a_head_and_its_lm_head_take_turns_over_new_images(monkeypatch):
    """The head takes 10 ms, words take 5 a token; the first turns, which are slow, do not count."""
    now, seen, order = [0.0], [], []

    def asked_by(way, seconds):
        def ask(example):
            seen.append(example.labels[0])
            order.append(way)
            now[0] += seconds(example) + (1.0 if len(seen) <= 2 * task_heads._WARM_UP else 0.0)
            return len(example.answer)

        return ask

    clock = types.SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 2 * now[0])
    monkeypatch.setattr(task_heads, "time", clock)
    ways = {
        "task_head": asked_by("task_head", lambda example: 0.01),
        "lm_head": asked_by("lm_head", lambda example: 0.005 * len(example.answer)),
    }
    examples = [
        tasks.Example(np.zeros((6, 4, 4, 3), np.uint8), "?", "abcd", (str(n),)) for n in range(12)
    ]
    (recipe,) = (recipe for recipe in make_adapters.RECIPES if recipe.name == "motion")
    row = task_heads._row(recipe, ways, examples)
    assert sorted(seen, key=int) == [str(n) for n in range(12)], "no image is asked twice"
    assert order[:4] == ["lm_head", "task_head", "task_head", "lm_head"], "they change places"
    assert row == {
        **{"head": "motion", "images": 6, "frame": "new", "answer_tokens": 4},
        **{"task_head_ms": 10, "lm_head_ms": 20, "times_less": 2},
        **{"task_head_processor_ms": 20, "lm_head_processor_ms": 40, "times_less_work": 2},
    }


def test_a_known_frame_was_shown_to_the_head_before_each_timed_request(monkeypatch):
    """The first sight of an image takes a second, which no time has in it."""
    now, seen = [0.0], set()

    def ask(example):
        now[0] += 0.01 if example.labels in seen else 1.0
        seen.add(example.labels)
        return 2

    clock = types.SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(task_heads, "time", clock)
    image = np.zeros((1, 4, 4, 3), np.uint8)
    examples = [tasks.Example(image, "?", "a", (str(n),)) for n in range(12)]
    (recipe,) = (recipe for recipe in make_adapters.RECIPES if recipe.name == "count")
    row = task_heads._row(recipe, {"task_head": ask, "lm_head": ask}, examples, known=True)
    assert (row["frame"], row["task_head_ms"], row["lm_head_ms"]) == (
        "in the encoder cache",
        10,
        10,
    )


@pytest.mark.parametrize("name", ["boxes", "count"])
def test_words_end_where_they_were_learned_and_are_forced_elsewhere(name):
    """A LM head that never saw the labels writes as many tokens as the right answer has."""
    (recipe,) = (recipe for recipe in make_adapters.RECIPES if recipe.name == name)
    calls = []

    def generate(prompts, adapter, sampling, images):
        calls.append((prompts, adapter, sampling, [len(mine) for mine in images]))
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=(5, 6, 2))])]

    engine: Any = types.SimpleNamespace(
        generate=generate,
        classify=lambda prompts, adapter, images: calls.append((prompts, adapter)),
        tokenizer=types.SimpleNamespace(encode=lambda text, add_special_tokens: text.split()),
    )
    example = tasks.Example(np.zeros((1, 4, 4, 3), np.uint8), "Q?", "face top left", ("face",))
    ways = task_heads.ways_of(engine, recipe, [example])
    assert ways["task_head"](example) == 0
    assert ways["lm_head"](example) == 3
    (prompts, _), (same, adapter, sampling, images) = calls
    assert prompts == same
    assert (adapter, images) == (name, [1])
    forced = (sampling.ignore_eos, sampling.max_tokens)
    assert forced == ((False, task_heads._MOST_TOKENS) if name == "boxes" else (True, 4))


@pytest.mark.long
def test_every_part_runs_on_a_small_shape(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.VISION, "depth", 2)
    monkeypatch.setitem(shapes.VISION, "deepstack_visual_indexes", [0, 1])
    assert device.switch(2, 64, 16, 4)["maps"] == 8
    model = shapes.write_shape(tmp_path / "m", "qwen3-vl-8b", **SMALL)
    assert device.tower(model, (256, 256))["tokens"] == 64
    head = shapes.write_headed(tmp_path / "h", model, 16, 10)
    sizes = {"max_num_batched_tokens": 128, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 24}
    assert device.heads(model, head, 1, **sizes)["task_head_ms"] > 0
    moe = SMALL | {"num_experts": 8, "num_experts_per_tok": 2}
    model = shapes.write_shape(tmp_path / "moe", "qwen3-vl-30b-a3b", **moe)
    found = device.frames(model, (256, 256), **sizes)
    assert found["tokens_per_s"] > 0
    assert 0 < found["tower_share_of_ttft"] < 1
