"""The search finds the fastest tiling that runs, goes on where it stopped, and says its gain."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from lora_jax.ops import tuning
from lora_jax.ops.tuning import Tunable, gain_over_fixed, search, tune


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that only the made-up kernels move."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: now.s))
    monkeypatch.setattr(Fake, "clock", now, raising=False)


class Fake:
    """A kernel whose time is known: tile 3 does not compile."""

    clock: SimpleNamespace

    def __init__(self, shapes, tiles=(1, 2, 3, 4)):
        self.ran: list[tuple[int, int]] = []
        self.tunable = Tunable(
            op="fake",
            shapes=tuple({"rows": rows} for rows in shapes),
            candidates=lambda shape: [Config(tile) for tile in tiles],
            prepare=self.prepare,
            calls=1,
        )

    def prepare(self, shape):
        def run(config):
            if config.tile == 3:
                raise ValueError("too many registers")

            def program():
                self.ran.append((shape["rows"], config.tile))
                self.clock.s += 1e-6 * (1 + 4 * abs(shape["rows"] - config.tile))

            return program

        return run


def test_the_fastest_that_runs_wins_and_the_hopeless_get_one_sample(capsys):
    fake = Fake([2, 4])
    entries = list(search(fake.tunable, [], progress=False))
    assert [e["config"]["tile"] for e in entries] == [2, 4]
    assert [e["us"] for e in entries] == [pytest.approx(1), pytest.approx(1)]
    assert [len(e["times"]) for e in entries] == [3, 3]
    assert fake.ran.count((2, 2)) == tuning.SAMPLES + 1  # and the one that warms up
    assert fake.ran.count((2, 4)) == 2
    assert "too many registers" in capsys.readouterr().err


def test_goes_on_where_it_stopped(tmp_path):
    table = tmp_path / "chip" / "fake.json"
    first = tune(Fake([2]).tunable, table, "chip", progress=False)
    fake = Fake([2, 4])
    both = tune(fake.tunable, table, "chip", progress=False)
    assert both[0] == first[0]
    assert {rows for rows, _ in fake.ran} == {4}
    written = json.loads(table.read_text())
    assert written["entries"] == both
    assert written["device"] == "chip"


def test_a_shape_at_which_nothing_runs_is_an_error():
    with pytest.raises(RuntimeError, match=r"fake: no configuration runs at \{'rows': 2\}"):
        list(search(Fake([2], tiles=(3,)).tunable, [], progress=False))


def test_gain_is_over_the_best_tiling_for_all_shapes():
    def entry(best, **times):
        listed = [{"config": {"tile": tile}, "us": us} for tile, us in times.items()]
        return {"us": best, "times": listed}

    entries = [entry(1.0, a=1.0, b=2.0, c=1.5), entry(1.0, a=4.0, b=2.0, c=1.5, d=1.0)]
    assert gain_over_fixed(entries) == pytest.approx(1.5)  # d does not run everywhere
    assert gain_over_fixed([]) == 1.0


def test_candidates_of_the_grouped_matmul_fit_and_start_with_the_formula():
    from lora_jax.ops.grouped_matmul import _gpu_tiles
    from lora_jax.ops.grouped_matmul import tuning as grouped

    for shape in grouped.shapes():
        found = list(grouped.candidates(shape))
        formula = _gpu_tiles.find_config(shape["rows"], shape["groups"], shape["d_out"])
        assert found[0] == formula
        assert len(found) == len(set(found)) >= 6
        assert all(c.stages >= 2 for c in found)
        assert all(c.columns * c.rows // 128 <= grouped.MOST_REGISTERS for c in found)
