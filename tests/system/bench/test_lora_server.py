"""The bench of a LoRA Server on GPUs measures what it says, over emulated ones."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from support.doubles.peer_double import EmulatedGpus

from bench.lora_server import gpu
from bench.lora_server.__main__ import Bench, line_of, rows_of_table
from bench.lora_server.plans import PLANS, TABLES, Case, mixtral, table_for
from bench.lora_server.programs import make_rows

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TINY = Case("tiny", 32, 48, 4, 2, rank=4, adapters=6, layers=2, dtype="float32")
PARTS = {"receive", "send", "lora", "exchange", "error", "overlap_echo", "overlap_refused"}


class ThreadWorker:
    """A worker in this process, on an emulated GPU whose programs run on a CPU device."""

    def __init__(self, gpus: EmulatedGpus, number: int):
        self._gpu = gpu.Gpu(TINY, gpus.device(number), jax.devices("cpu")[number])
        self._pool = ThreadPoolExecutor(1)

    def start(self, name, *arguments):
        future = self._pool.submit(getattr(self._gpu, name), *arguments)

        def result():
            try:
                return future.result(120)
            except (ValueError, RuntimeError) as error:
                raise RuntimeError(str(error)) from error

        return result

    def call(self, name, *arguments):
        return self.start(name, *arguments)()

    def close(self):
        self._pool.shutdown()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    return EmulatedGpus(tmp_path_factory.mktemp("gpus"))


@pytest.fixture
def bench(gpus, tmp_path, monkeypatch):
    for name in ("FEW", "CALLS", "SAMPLES"):
        monkeypatch.setattr(gpu, name, 1)
    monkeypatch.setattr(gpu, "LIMIT_S", 60.0)
    workers = [ThreadWorker(gpus, number) for number in range(3)]
    yield Bench(workers, str(tmp_path), TINY)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("EP1-PP1", marks=pytest.mark.slow),
        pytest.param("EP4-PP1, 1 of its ranks, pull", marks=pytest.mark.long),
        pytest.param("EP1-PP2", marks=pytest.mark.slow),
        pytest.param("EP1-PP1, push in the stream", marks=pytest.mark.slow),
        pytest.param("EP1-PP1, 3 at once", marks=pytest.mark.long),
        pytest.param("EP2-PP2, 1 of its stages", marks=pytest.mark.long),
        "EP1-PP1, 2 instances",
    ],
)
def test_a_plan_has_its_row(bench, name):
    plan = PLANS[name]
    (row,) = rows_of_table(bench, [(plan, 4)], float("inf"))
    assert "failed" not in row
    alone = plan.instances == 1
    assert set(row) >= PARTS if alone else not PARTS & set(row)
    assert row["exposed"] == row["overlap"] - row["base"]
    if alone:
        assert row["error"] < 1e-5
        assert row["exchange"] == pytest.approx(row["receive"] + row["send"] + row["lora"])
    assert json.dumps(row)
    assert line_of(row).startswith(name)


def test_three_ranks_get_the_rows_of_four():
    case, some = mixtral(8), PLANS["EP4-PP1, 3 of its ranks"]
    every = PLANS["EP4-PP1, 3 of its ranks, all rows"]
    assert (some.tokens(case, 128), every.tokens(case, 128)) == (128, 172)
    sent = {
        plan: sum(int((rows.row_to_server >= 0).sum()) for rows in made.values()) / len(made)
        for plan, batch in ((some, 128), (every, 172), (PLANS["EP4-PP1"], 128))
        for made in [make_rows(case, plan, batch, (0, 0))]
    }
    whole = sent[PLANS["EP4-PP1"]]
    assert whole == case.rows(128)
    assert sent[some] < 0.85 * whole
    assert sent[every] == pytest.approx(whole, rel=0.1)


def test_a_stage_that_is_not_whole_has_its_layers_left_out():
    case = mixtral(8)
    assert PLANS["EP1-PP4, 3 of its ranks"].layers(case) == [0, 1, 2]
    assert PLANS["EP2-PP2, 1 of its stages"].layers(case) == [0, 2]
    assert PLANS["EP4-PP1, 3 of its ranks"].layers(case) == [0, 1, 2, 3]
    assert PLANS["EP4-PP2, 7 of its ranks"].layers(case) == [0, 2]


def test_two_instances_use_both_stages_though_one_is_not_whole():
    case, plan = mixtral(8), PLANS["EP4-PP2, 6 of its ranks, 2 instances"]
    sent = {
        layer: np.unique(np.asarray(rows.row_to_server))
        for layer, rows in make_rows(case, plan, 128, (0, 0)).items()
    }
    assert [sent[layer].tolist() for layer in range(4)] == [[0, 1, 2, 3], [-1, 4, 5]] * 2


@pytest.mark.parametrize("gpus", TABLES)
def test_a_table_fits_its_gpus(gpus):
    table = TABLES[gpus]
    assert len(set(table)) == len(table)
    assert all(PLANS[name].gpus <= gpus for _, name, _ in table)


def test_the_largest_table_that_the_gpus_fill_is_measured():
    assert [table_for(n) for n in (2, 4, 7, 8, 9)] == [TABLES[n] for n in (4, 4, 4, 8, 8)]


def test_what_does_not_fit_says_so(bench):
    plans = [PLANS["EP4-PP1"], PLANS["EP1-PP1"]]
    rows = list(rows_of_table(bench, [(plan, 4) for plan in plans], 0.0))
    assert [row["left_out"] for row in rows] == ["needs 5 GPUs", "no time left"]
