"""The search finds the fastest tiling that runs, goes on where it stopped, and says its gain."""

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops import tuning
from lora_jax.ops.grouped_matmul import _gpu_tiles
from lora_jax.ops.grouped_matmul import tuning as grouped
from lora_jax.ops.lora_gemm import _gpu_schedule
from lora_jax.ops.lora_gemm import tuning as lora
from lora_jax.ops.tuning import gain_over_fixed, search, tune
from lora_jax.ops.tuning_programs import OPS, Shape, Tunable, find_tunable

MATRICES = {"grouped_matmul": 1, "gated_matmul": 2}
OCCUPY = tuning._occupy


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that only the made-up kernels move; the device is never busy before them."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(tuning, "_occupy", lambda: jnp.zeros(()))
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: now.s))
    monkeypatch.setattr(TimedKernel, "clock", now, raising=False)
    return now


class TimedKernel:
    """A kernel, and its compiler, whose time is known: tile 3 does not compile."""

    clock: SimpleNamespace

    def __init__(self, shapes, tiles=(1, 2, 3, 4)):
        self.ran: list[tuple[int, int]] = []
        self.waited = False
        self.tunable = Tunable(
            op="timed",
            shapes=tuple({"rows": rows} for rows in shapes),
            candidates=lambda shape: [Config(tile) for tile in tiles],
            program=lambda shape, config: lambda rows: rows,
            arguments=lambda shape: [np.zeros(shape["rows"], np.int32)],
            launches=lambda shape: 1,
        )

    def compile(self, op, shape, config):
        def program(rows):
            assert rows.shape == (shape["rows"],)
            assert self.waited
            self.ran.append((shape["rows"], config.tile))
            self.clock.s += 1e-6 * (1 + 4 * abs(shape["rows"] - config.tile))
            return rows

        def load():
            if config.tile == 3:
                raise ValueError("too many registers")
            return program

        assert op == "timed"
        assert not self.ran  # all are made before one is timed
        return load

    def wait(self, *, progress):
        self.waited = not progress


def test_the_fastest_that_runs_wins_and_the_hopeless_get_three_samples(capsys):
    timed = TimedKernel([2, 4])
    entries = list(search(timed.tunable, [], timed, progress=False))
    assert [e["config"]["tile"] for e in entries] == [2, 4]
    assert [e["us"] for e in entries] == [pytest.approx(1), pytest.approx(1)]
    assert [len(e["times"]) for e in entries] == [3, 3]
    # And once before, to warm up.
    assert timed.ran.count((2, 2)) == 1 + tuning.SAMPLES * tuning.CALLS
    assert timed.ran.count((2, 4)) == 1 + 3 * tuning.CALLS
    assert "too many registers" in capsys.readouterr().err


def test_a_moment_in_which_all_is_slow_costs_no_tiling_its_place(monkeypatch):
    """While the first tiling's first two samples are taken, the host does something else."""
    timed, samples = TimedKernel([2], tiles=(2, 1)), []

    def elapsed(call):
        samples.append(call)
        return taken(call) + (100.0 if len(samples) in (2, 5) else 0.0)

    taken = tuning._elapsed
    monkeypatch.setattr(tuning, "_elapsed", elapsed)
    (entry,) = search(timed.tunable, [], timed, progress=False)
    assert entry["config"]["tile"] == 2
    assert entry["us"] == pytest.approx(1)
    turn = [2] * tuning.CALLS + [1] * tuning.CALLS
    assert [tile for _, tile in timed.ran[2:]][: 2 * len(turn)] == turn * 2


@pytest.mark.parametrize("busy_s", [1.0, 1e-3], ids=["enqueued in time", "late"])
def test_the_host_counts_only_while_the_device_waits(clock, monkeypatch, busy_s):
    """A device runs what it has in order, 2 ms a call; the host takes 3 ms to enqueue one."""
    free = SimpleNamespace(s=0.0)

    class Result:
        """What is ready when the device has run all that was enqueued before it."""

        def __init__(self, took_s):
            free.s = max(free.s, clock.s) + took_s
            self.at = free.s

        def block_until_ready(self):
            clock.s = max(clock.s, self.at)

    def program():
        clock.s += 3e-3
        return Result(2e-3)

    monkeypatch.setattr(tuning, "_occupy", lambda: Result(busy_s))
    took = tuning._elapsed(program) - tuning._elapsed(lambda: None)
    enqueued = tuning.CALLS * 3e-3 + 2e-3 - busy_s
    assert took == pytest.approx(tuning.CALLS * 2e-3 if busy_s == 1.0 else enqueued)


def test_goes_on_where_it_stopped(tmp_path):
    table = tmp_path / "chip" / "timed.json"
    one = TimedKernel([2])
    first = tune(one.tunable, table, "chip", one, progress=False)
    timed = TimedKernel([2, 4])
    both = tune(timed.tunable, table, "chip", timed, progress=False)
    assert both[0] == first[0]
    assert {rows for rows, _ in timed.ran} == {4}
    written = json.loads(table.read_text())
    assert written["entries"] == both
    assert written["device"] == "chip"
    assert written["over_best_single_tiling"] == gain_over_fixed(both)


def test_a_shape_at_which_nothing_runs_is_an_error():
    timed = TimedKernel([2], tiles=(3,))
    with pytest.raises(RuntimeError, match=r"timed: no configuration runs at \{'rows': 2\}"):
        list(search(timed.tunable, [], timed, progress=False))


def test_the_command_writes_a_table_for_each_op(tmp_path, monkeypatch, capsys):
    timed = TimedKernel([2, 4])
    monkeypatch.setattr(tuning, "find_tunable", lambda op: timed.tunable)
    monkeypatch.setattr(timed, "wait", lambda progress: setattr(timed, "waited", True))
    kept = []

    @contextlib.contextmanager
    def programs(folder, processes):
        kept.append((folder, processes))
        yield timed

    monkeypatch.setattr(tuning, "Programs", programs)
    options = ["--out", str(tmp_path), "--programs", str(tmp_path / "kept"), "--processes", "3"]
    monkeypatch.setattr(sys, "argv", ["tuning", "--op", "lora_gemm", *options])
    tuning.main()
    assert kept == [(tmp_path / "kept", 3)]
    kind = tuning.device_folder(jax.devices()[0].device_kind)
    written = json.loads((tmp_path / kind / "lora_gemm.json").read_text())
    assert [entry["config"]["tile"] for entry in written["entries"]] == [2, 4]
    assert (
        f"lora_gemm: {gain_over_fixed(written['entries'])['gain']:.2f}x" in capsys.readouterr().out
    )


def test_arguments_without_values_are_random_numbers(monkeypatch):
    """The same at every shape: programs are timed with them, and not compared."""
    monkeypatch.setattr(tuning, "NUMBERS", 64)
    monkeypatch.setattr(tuning, "_random_numbers", tuning._random_numbers.__wrapped__)
    given = np.arange(3, dtype=np.int32)
    shapes = [jax.ShapeDtypeStruct((2, n), jnp.bfloat16) for n in (3, 5)]
    tunable = dataclasses.replace(TimedKernel([]).tunable, arguments=lambda shape: (given, shapes))
    kept, (narrow, wide) = tuning.random_arrays(tunable, {})
    np.testing.assert_array_equal(kept, given)
    assert (narrow.shape, wide.shape, wide.dtype) == ((2, 3), (2, 5), jnp.bfloat16)
    np.testing.assert_array_equal(narrow.reshape(-1), wide.reshape(-1)[:6])
    assert 0.5 < float(jnp.std(wide.astype(jnp.float32))) < 2


def test_the_device_is_kept_busy_by_reads(monkeypatch):
    monkeypatch.setattr(tuning, "READ_ROWS", 1)
    tuning._much_to_read.cache_clear()
    reads = []
    monkeypatch.setattr(tuning, "_read", lambda much: reads.append(much.nbytes) or much[0, 0])
    assert OCCUPY() == 0
    assert reads == [2 << 20] * tuning.READS
    tuning._much_to_read.cache_clear()


def test_gain_is_over_the_best_tiling_for_all_shapes():
    def entry(best, **times):
        listed = [{"config": {"tile": tile}, "us": us} for tile, us in times.items()]
        return {"us": best, "times": listed}

    entries = [entry(1.0, a=1.0, b=2.0, c=1.5), entry(1.0, a=4.0, b=2.0, c=1.5, d=1.0)]
    found = gain_over_fixed(entries)
    assert found["config"] == {"tile": "c"}  # d does not run everywhere
    assert found["gain"] == found["worst"] == pytest.approx(1.5)
    assert gain_over_fixed([])["gain"] == 1.0


def formula(op: str, shape: Shape) -> object:
    """Return the tiling that is taken at a shape which no table has."""
    if op == "lora_gemm":
        return _gpu_schedule.find_config(shape["rows"], shape["slots"], shape["rank"])
    sizes = (shape["rows"], shape["groups"], shape["d_out"])
    return _gpu_tiles.find_config(*sizes, MATRICES[op])


@pytest.mark.parametrize("op", OPS)
def test_candidates_start_with_the_formula(op):
    tunable = find_tunable(op)
    everywhere = set.intersection(*(set(tunable.candidates(shape)) for shape in tunable.shapes))
    assert len(everywhere) >= 2  # so that there is a best single tiling
    for shape in tunable.shapes:
        found = list(tunable.candidates(shape))
        assert found[0] == formula(op, shape)
        assert len(found) == len(set(found)) >= 4


@pytest.mark.parametrize("op", MATRICES)
def test_candidates_of_products_fit(op):
    tunable, matrices = find_tunable(op), MATRICES[op]
    for config in {c for shape in tunable.shapes for c in tunable.candidates(shape)}:
        assert config.stages >= 2
        assert matrices * config.columns * config.rows // 128 <= grouped.MOST_REGISTERS


def test_candidates_of_lora_are_taken_as_they_are():
    """At their own shape they are fitted already; at the largest rank they still fit.

    Fewer slots than two and the copies of a work would wait for the work itself.
    """
    for shape in lora.shapes():
        for config in lora.candidates(shape):
            assert config == _gpu_schedule.fitted(config, shape["rank"])
            largest = _gpu_schedule.fitted(config, _gpu_schedule.MAX_RANK)
            assert min(config.slots, largest.slots) >= 2
            assert config.shrink_stages == largest.shrink_stages >= 3


@pytest.mark.parametrize("op", MATRICES)
def test_programs_read_more_weights_than_a_cache_holds(op):
    tunable = find_tunable(op)
    for shape in tunable.shapes:
        xs, sets, sizes = tunable.arguments(shape)
        assert len(xs) == tunable.launches(shape)
        used = min(shape["groups"], shape["rows"])
        layer = sum(w.size // shape["groups"] * used * 2 for w in sets[0])
        assert layer * len(sets) >= grouped.COLD_BYTES
        varies = shape["groups"] == 1 and shape["rows"] < grouped.FULL_ROWS
        rows = [size.sum() for size in sizes]
        assert rows == [shape["rows"], *([shape["rows"] // 2] if varies else [])]
        assert tunable.launches(shape) % len(rows) == 0


@pytest.mark.parametrize("op", OPS)
def test_a_program_has_its_launches_and_reads_other_weights_in_each(op, monkeypatch):
    tunable = find_tunable(op)
    shape = tunable.shapes[0]
    config = next(iter(tunable.candidates(shape)))
    xs, sets, table = tunable.arguments(shape)
    asked = []

    def launch(*args, config, **_):
        weights = args[1] if op == "lora_gemm" else args[1:-1]
        asked.append((weights, config))
        return args[0]

    module = lora if op == "lora_gemm" else grouped
    monkeypatch.setattr(module.pallas_gpu, op, launch)
    monkeypatch.setattr(module, "LoraBatch", lambda x, a, b, *_, **rest: (a, b), raising=False)
    pools = [tuple(f"{part} of {n}" for part in range(len(some))) for n, some in enumerate(sets)]
    made = tunable.program(shape, config)([np.zeros((1, 1))] * len(xs), pools, table)
    assert len(made) == len(asked) == tunable.launches(shape)
    assert {config for _, config in asked} == {config}
    assert [got[: len(pools[0])] for got, _ in asked] == [
        pools[n % len(pools)] for n in range(len(asked))
    ]


def test_launches_of_lora_read_rank_rows_of_their_own():
    """Each slot that is asked for its own, all within the pools; every launch other pools."""
    for shape in lora.shapes():
        xs, sets, (entries, scaling, slot, expert) = lora.arguments(shape)
        assert len(xs) == lora.launches(shape) >= len(sets)
        rank_rows, wide = shape["rank"] * len(np.unique(slot)), shape["d_out"] + shape["d_in"]
        moved = 2 * wide * (rank_rows + shape["rows"]) * len(sets)
        assert len(sets) == lora.MOST_LAUNCHES or moved >= lora.COLD_BYTES
        assert slot.shape == expert.shape == (shape["rows"],)
        assert scaling.shape == (shape["slots"],) == entries[:, 0].shape
        asked = entries[np.unique(slot)]
        assert (asked[:, 2] == shape["rank"]).all()
        assert (np.diff(np.sort(asked[:, 0])) >= shape["rank"]).all()
        assert entries[:, :2].max() + shape["rank"] <= min(pool.shape[0] for pool in sets[0])
