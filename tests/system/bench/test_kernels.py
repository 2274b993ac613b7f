"""The kernels' bench: its numbers are known on the host, it finds wrong kernels, and goes on."""

import json
import re
import sys
import types
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.kernel_calls import lora_kernel

from bench.kernel_plots import overview, plot_kernels
from bench.kernels import __main__ as bench
from bench.kernels import few, grid, lora, moe, popularities, timing
from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import Numbers
from bench.kernels.peers import torch_grouped_matmul
from bench.kernels.summary import say_grid, summarise, table
from bench.kernels.timing import MOST_OPS, cold_sets, repeats_for
from cuda_backend import lora_gemm, reroute
from lora_jax.ops.cases import POPULARITIES
from lora_jax.ops.lora_gemm import reference

plain = lora_kernel(reference.lora_gemm)


@pytest.fixture
def machine():
    with ThreadPoolExecutor(1) as threads:
        yield Machine(1e12, 1e12, threads)


@pytest.fixture
def quick(monkeypatch):
    """Time nothing: one call of the shortest programs."""

    def once(program, state, ops):
        jax.block_until_ready(program(state))
        return 7.0

    for part in (lora, moe):
        monkeypatch.setattr(part, "time_us", once)
        monkeypatch.setattr(part, "repeats_for", lambda expected_us, ops: 1)
        monkeypatch.setattr(part, "cold_sets", lambda num_bytes, least, most: least)


def test_the_host_knows_every_row_on_the_device():
    numbers = Numbers((3, 5, 64), seed=4, scale=64**-0.5)
    there = np.asarray(numbers.on_device(), np.float64).reshape(-1, 64)
    np.testing.assert_array_equal(numbers.rows(range(15)), there)
    assert there.std() == pytest.approx(1 / 8, rel=0.1)
    assert len({row.tobytes() for row in there}) == 15
    assert (Numbers((3, 5, 64), seed=5).rows([0]) != 8 * numbers.rows([0])).any()


def apply_plainly(point, y, s, pools, wrong_by=0.0):
    """Do what the kernels of bench.kernels.lora do, in the order of the rows."""
    owners = s.items.order
    x = s.x * jnp.bfloat16(1 + wrong_by)
    h = plain_h(x, pools[0], s.entries, s.scaling, owners, point.rank)
    if point.op == "shrink":
        return h
    old = y if point.adds else jnp.zeros_like(y)
    none = jnp.zeros_like(owners)
    return plain(old, x, *pools, s.entries, s.scaling, owners, none, point.rank)


def plain_h(x, a_pool, entries, scaling, owners, rank):
    rows = entries[owners, 0][:, None] + jnp.arange(rank)[None]
    h = jnp.einsum("td,trd->tr", x.astype(jnp.float32), a_pool[rows].astype(jnp.float32))
    return (h * scaling[owners, None]).astype(x.dtype)


@pytest.fixture
def plain_kernels(monkeypatch):
    """Let row_to_slot stand for the order of rows and items, so that any CPU can do the work."""

    def row_items(owners, experts, slots, rank):
        none = jnp.zeros((len(owners), 4), jnp.int32)
        return lora_gemm.CudaWorkList(owners, none, none[0, :1])

    def shrink(x, a_pool, entries, scaling, items, rank):
        return plain_h(x, a_pool, entries, scaling, items.order, rank)

    monkeypatch.setattr(lora_gemm, "row_items", row_items)
    monkeypatch.setattr(lora_gemm, "lora_shrink", shrink)
    monkeypatch.setattr(lora, "apply", apply_plainly)


def lora_points(**sizes) -> list[lora.Point]:
    sizes = {"rows": 1, "d_in": 64, "d_out": 128, "rank": 8, "slots": 6, **sizes}
    return [lora.Point("tiny", op, **sizes) for op in ("shrink", "expand", "pair")]


@pytest.mark.long
def test_points_of_a_cell_share_inputs_and_are_checked(machine, quick, plain_kernels):
    points = lora_points() + lora_points(rank=16, slots=3, adds=False)[2:]
    jobs = lora.jobs(points, machine)
    assert [job.name for job in jobs] == [point.name for point in points]
    assert len({id(job.programs[0]) for job in jobs}) == 2
    for job, point in zip(jobs, points, strict=True):
        row = job.measure()
        assert row["error"] < 1e-2
        assert row["floor_us"] == pytest.approx(lora.bytes_moved(point, point.owners) / 1e6)


def test_a_wrong_kernel_is_found(machine, quick, plain_kernels, monkeypatch):
    wrong = lambda *arguments: apply_plainly(*arguments, wrong_by=0.25)  # noqa: E731
    monkeypatch.setattr(lora, "apply", wrong)
    jobs = lora.jobs(lora_points(adds=False)[:2], machine)
    assert all(job.measure()["error"] > 0.1 for job in jobs)


def test_sets_take_adapters_of_their_own():
    points = lora_points(rows=64)
    pools = lora.PoolsBySize(points)
    sets = len(points[0].owners)
    assert pools.rows(points[0]) == sets * 6 * 8
    cell = lora.Cell.__new__(lora.Cell)
    cell.point, cell.pools, cell.sets = points[0], pools, sets
    taken = np.concatenate([cell.blocks(i) for i in range(sets)])
    assert sorted(taken) == list(range(sets * 6))


def test_small_points_rotate_more_sets_than_large_ones():
    sizes = {1: 8, 64: 8, 4096: 5, 16384: 4}
    for rows, sets in sizes.items():
        point = lora.Point("", "expand", rows, 14336, popularity="identical")
        assert len(point.owners) == sets
    assert cold_sets(1e6, 2, 8) == 8
    assert cold_sets(1e9, 2, 8) == 2
    assert repeats_for(1.0, 128) * 128 <= MOST_OPS


def test_a_layer_of_few_bytes_rotates_more_sets_than_a_large_one(machine):
    counts = {("deepseek-v2-lite", 1): 4, ("deepseek-v2-lite", 128): 3, ("mixtral-8x7b", 128): 2}
    for (model, adapters), sets in counts.items():
        point = moe.Point(model, 16, 32, adapters)
        layers = moe.layers_of(point, moe.Pools(model, point.rank, 4 * adapters))
        assert len(layers) == sets
        starts = [layer.entries["gate"][0, 0] for layer in layers]
        assert len({*starts}) == sets


class Device:
    """Time as a device and its host spend it: a call takes 1500 us, a wait 300, at times more."""

    def __init__(self, hindered: float):
        self.now, self.chance, self.rng = 0.0, hindered, np.random.default_rng(0)

    def run(self, state):
        self.now += 1.5e-3
        return state

    def wait(self, state):
        self.now += 3e-4 + 5e-3 * (self.rng.random() < self.chance)
        return state


@pytest.mark.parametrize("hindered", [0.0, 0.4])
def test_a_time_is_the_device_s_and_not_the_host_s(monkeypatch, hindered):
    device = Device(hindered)
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: device.now))
    monkeypatch.setattr(jax, "block_until_ready", device.wait)
    assert timing.time_us(device.run, None, 30) == pytest.approx(50)
    if not hindered:
        programs = [lambda: device.run(None), lambda: device.run(device.run(None))]
        assert timing.times_in_turn_us(programs, 30) == pytest.approx([50, 100])


@pytest.mark.long
def test_layers_of_experts_are_checked(machine, quick, monkeypatch):
    def lora_gemms(modules, x, a_pool, b_pool, slots, experts, rank, items):
        pools, owners = (x, a_pool, b_pool), (slots, experts, rank)
        return tuple(plain(y, *pools, *table, *owners) for y, *table in modules)

    no_items = lambda *_: types.SimpleNamespace(items=None)  # noqa: E731
    monkeypatch.setattr(reroute, "adapter_items", lambda owners, *_: owners)
    monkeypatch.setattr(reroute, "row_map", no_items)
    monkeypatch.setattr(moe, "lora_gemms", lora_gemms)
    points = [moe.Point("tiny", 3, 8, adapters) for adapters in (1, 4)]
    jobs = moe.jobs(points, machine)
    assert all(job.measure()["error"] < 1e-2 for job in jobs)
    wrong = lambda *arguments: lora_gemms(*arguments[:4], arguments[4] * 0, *arguments[5:])  # noqa: E731
    monkeypatch.setattr(moe, "lora_gemms", wrong)
    (job,) = moe.jobs(points[1:], machine)
    assert job.measure()["error"] > 0.1


def done(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


def fake_part(fails: set[str]) -> types.ModuleType:
    """Return a part of three points, of which some fail."""

    def measured(name: str) -> dict:
        if name in fails:
            raise RuntimeError(f"no {name}")
        return {"name": name, "us": 2.0, "floor_us": 1.0, "error": 0.0, "bar_us": 1.0}

    module = types.ModuleType("bench.kernels.made_up")
    module.points = lambda: tuple(types.SimpleNamespace(name=name) for name in "abc")
    module.jobs = lambda points, machine: [
        Job(p.name, (done(None),), lambda name=p.name: measured(name)) for p in points
    ]
    return module


def test_a_point_that_fails_loses_no_other_and_is_tried_again(
    machine, monkeypatch, tmp_path, capsys
):
    file = tmp_path / "kernels.json"
    monkeypatch.setitem(sys.modules, "bench.kernels.made_up", fake_part({"b"}))
    bench.run("made_up", bench.Results(file, {"device": "none"}), machine)
    assert "no b" in capsys.readouterr().out
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["a", "c"]
    monkeypatch.setitem(sys.modules, "bench.kernels.made_up", fake_part({"a", "c"}))
    bench.run("made_up", bench.Results(file, {"device": "another"}), machine)
    found = json.loads(file.read_text())
    assert found["device"] == "none"
    assert [row["name"] for row in found["rows"]] == ["a", "c", "b"]
    assert not any(row["met"] for row in found["rows"])


def test_what_cannot_be_traced_fails_when_it_is_measured(machine):
    failed = machine.compile(lambda x: x + jnp.zeros(3), jnp.zeros(2))
    with pytest.raises(TypeError, match="shapes"):
        failed.result()


def test_the_grid_is_every_measured_point_once():
    names = [point.name for point in grid.points()]
    assert len(set(names)) == len(names) == 63 + 2 + 27


def test_every_popularity_is_timed_at_every_rank_and_number_of_tokens():
    points = popularities.points()
    assert len({point.name for point in points}) == len(points) == (5 * 5 + 1) * 6
    assert {point.popularity for point in points} == set(POPULARITIES)


@pytest.mark.long
def test_rows_without_an_adapter_cost_nothing_and_are_checked(machine, quick, plain_kernels):
    (point,) = lora_points(popularity="none", rows=4)[2:]
    assert lora.bytes_moved(point, point.owners) == 0
    (job,) = lora.jobs([point], machine)
    row = job.measure()
    assert (row["floor_us"], row["distinct"]) == (0, 0)
    assert row["error"] == 0


def test_the_summary_names_what_is_slower():
    rows = [
        {"name": "fast", "us": 1.0, "peer_us": 4.0, "part": "grid"},
        {"name": "slow", "us": 2.0, "peer_us": 1.0, "part": "grid"},
        {"name": "without peer", "us": 2.0, "peer_us": None, "part": "grid"},
        {"name": "not of the grid", "us": 2.0, "peer_us": 1.0, "part": "lora"},
    ]
    found = summarise(rows)
    assert found == {
        "points": 2,
        "geometric_mean": pytest.approx(2**0.5),
        "slower_than_peer": {"slow": 0.5},
    }
    assert "1.41 times" in say_grid(rows)
    assert "0.50 slow" in say_grid(rows)
    assert summarise(rows[2:]) is None


def measured(op: str, rows: int, **said) -> dict:
    return {
        "name": f"{op} {rows}",
        "op": op,
        "rows": rows,
        "us": 3.0,
        "floor_us": 2.0,
        "part": "lora",
    } | said


def test_the_table_has_every_row_and_what_is_missing():
    rows = [measured("pair", 64, bar_us=4.0, peer_us=6.0, error=1e-3)]
    rows.append(measured("reroute", 1, floor_us=0.0, error=0.0))
    rows.append(measured("shrink", 8, peer_us=1.5, error=2e-3, part="grid"))
    rows.append(measured("pair", 1, floor_us=0.0, error=0.0, part="popularities"))
    said = {"device": "a card", "date": "today", "copy_tb_per_s": 4.0, "dense_tflop_per_s": 700.0}
    points, cells, everywhere = re.split("## Grid|## Popularities", table({**said, "rows": rows}))
    assert "a card, today" in points
    assert "| pair 64 | 2.0 | 3.0 | 1.50 | 4.0 | 6.0 | 2.00 | 1.0e-03 |" in points
    assert "| reroute 1 | - | 3.0 | - | - | - | - | 0.0e+00 |" in points
    assert "| shrink 8 | 2.0 | 3.0 | 1.50 | - | 1.5 | 0.50 | 2.0e-03 |" in cells
    assert "| pair 1 | - | 3.0 |" in everywhere
    assert "- 0.50 shrink 8" in everywhere  # the summary, last of all
    rows[1]["plain_us"] = 9.0
    assert "| - | 0.0e+00 | plain 9.0 |" in table({**said, "rows": rows})


@pytest.mark.long
def test_plots_of_whatever_was_measured_lie_beside_the_file(tmp_path):
    zipf = {"popularity": "zipf", "rank": 64, "slots": 512, "part": "grid"}
    layer = {"model": "tiny", "rank": 8, "adapters": 1, "part": "grid"}
    rows = [measured("pair", 64, bar_us=3.0), measured("reroute", 1, floor_us=0.0)]
    result = {"device": "none", "date": "today", "copy_tb_per_s": 1.0, "rows": rows}
    plot_kernels(result, tmp_path / "some.png")
    assert [path.name for path in tmp_path.iterdir()] == ["some.png"]
    rows += [measured(op, n, peer_us=4.0, **zipf) for op in ("shrink", "pair") for n in (1, 64)]
    rows += [measured("moe", 8 * n, tokens=n, peer_us=9.0, **layer) for n in (4, 16)]
    spread = [(popularity, n) for popularity in ("zipf", "none") for n in (1, 64)]
    rows += [
        measured("pair", n, popularity=p, rank=8, floor_us=float(p != "none"), part="popularities")
        for p, n in spread
    ]
    plot_kernels(result, tmp_path / "all.png")
    names = {f"all{kind}.png" for kind in ("", "_phases", "_tokens", "_popularities")}
    assert names < {path.name for path in tmp_path.iterdir()}


def test_the_overview_shows_at_most_twelve_points_and_those_with_a_peer_first():
    ops = ("pair", "shrink", "expand", "moe", "grouped_matmul", "merge", "attention")
    rows = [measured(op, n, peer_us=4.0 if n == 7 else None) for op in ops for n in range(8)]
    shown = overview(rows)
    assert len(shown) == 12
    assert all(any(row["op"] == op and row["rows"] == 7 for row in shown) for op in ops)


def test_torch_multiplies_the_same_rows_where_it_is(monkeypatch):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((8, 16), (3, 32, 16)))
    sizes = jnp.asarray([3, 0, 5], jnp.int32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_grouped_matmul([x], w, sizes) is None
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    peer = torch_grouped_matmul([x], w, sizes)
    assert peer is not None
    (y,) = jax.block_until_ready(peer()).value
    assert waited
    want = jnp.einsum("td,tod->to", x, w[jnp.repeat(jnp.arange(3), sizes)])
    np.testing.assert_allclose(y.float().numpy(), np.asarray(want, np.float32), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("gated", [True, False])
def test_products_of_few_rows_are_compared_with_the_other_kernel(gated, machine, monkeypatch):
    """Gate and up of experts, and three maps of one x: times of both, and how far they differ."""
    groups, widths = (3, (64, 64)) if gated else (1, (64, 32, 32))
    product = few.Product("a product", 5, groups, 256, widths, gated)
    monkeypatch.setattr(few, "CUDA", "reference")
    monkeypatch.setattr(few, "MOSAIC", "xla")
    times = iter((6.0, 12.0))

    def once(program, state, ops):
        assert ops == few.MOST_OPS // 16 * 16  # a program's, of 16 sets of arrays
        jax.block_until_ready(program(state))
        return next(times)

    monkeypatch.setattr(few, "time_us", once)
    assert all(point.format in point.name for point in few.points())
    (job,) = few.jobs([few.Point("awq", product)], machine)
    row = job.measure()
    assert (row["us"], row["mosaic_us"], row["over_mosaic"]) == (6.0, 12.0, 0.5)
    codes, groups_of_128 = sum(widths) * groups * 256 // 2, sum(widths) * groups * 2
    written = widths[0] if gated else sum(widths)
    used = np.count_nonzero(product.sizes()) / groups
    moved = used * (codes + 5 * groups_of_128) + 2 * 5 * (256 + written)
    assert row["floor_us"] == pytest.approx(moved / machine.bandwidth * 1e6)
    assert row["error"] < 0.05
