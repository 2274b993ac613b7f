"""The simulated tier against a plain LRU, values by hand, and arrivals against their rates."""

import gzip
import json
import random
from collections import OrderedDict

import numpy as np
import pytest

from bench import adapter_eviction
from bench.adapter_eviction import POLICIES, azure_2021, client_arrivals, servegen, simulate

MB = 1 << 20


def plain_lru(asked, sizes, budget):
    """Return the hits of a cache that is an ordered dictionary."""
    cache, hits = OrderedDict(), 0
    for name in asked:
        if name in cache:
            hits += 1
            cache.move_to_end(name)
            continue
        while sum(cache.values()) + sizes[name] > budget:
            cache.popitem(last=False)
        cache[name] = sizes[name]
    return hits


def test_lru_is_that_of_an_ordered_dictionary():
    rng = random.Random(3)
    names = [f"a{n}" for n in range(30)]
    sizes = {name: rng.randint(1, 9) * MB for name in names}
    asked = rng.choices(names, [1 / (n + 1) for n in range(30)], k=2000)
    found = simulate(asked, sizes, 40 * MB, POLICIES["lru"])
    assert found["hit_ratio"] == plain_lru(asked, sizes, 40 * MB) / 2000


def test_gdsf_keeps_what_is_small_and_used_and_lru_does_not():
    sizes = {"small": 5 * MB, "large": 50 * MB, "other": 50 * MB}
    asked = ["small", "small", "large", "other", "small"]
    lru, gdsf = (simulate(asked, sizes, 54 * MB, POLICIES[name]) for name in ("lru", "gdsf"))
    assert lru["hit_ratio"] == 1 / 5
    # Room for one large and nothing else: "small" goes all the same, as 50 + 5 exceed 54.
    assert gdsf["hit_ratio"] == 1 / 5
    lru, gdsf = (simulate(asked, sizes, 60 * MB, POLICIES[name]) for name in ("lru", "gdsf"))
    assert (lru["hit_ratio"], gdsf["hit_ratio"]) == (1 / 5, 2 / 5)
    read_ms = 3 * 5 + 1000 * 105 * MB / 500e6
    assert gdsf["read_ms_per_request"] == pytest.approx(read_ms / 5)
    assert gdsf["read_ms_per_miss"] == pytest.approx(read_ms / 3)


def test_what_is_larger_than_the_tier_is_read_each_time():
    sizes = {"large": 50 * MB, "small": MB}
    for policy in POLICIES.values():
        found = simulate(["small", "large", "large", "small"], sizes, 10 * MB, policy)
        assert found["hit_ratio"] == 1 / 4


def test_arrivals_follow_the_rates_and_their_spread():
    windows = [(0.0, 2.0, 0.5), (600.0, 8.0, 0.5), (6000.0, 1.0, 0.5)]
    times = np.asarray(client_arrivals(windows, 0.5, np.random.default_rng(1)))
    counts = [np.sum((times >= start) & (times < start + 600)) for start, _, _ in windows]
    np.testing.assert_allclose(counts, [600, 2400, 300], rtol=0.08)
    assert len(times) == sum(counts)
    for spread in (0.5, 1.0, 3.0):
        times = client_arrivals([(0.0, 50.0, spread)], 1.0, np.random.default_rng(2))
        gaps = np.diff(times)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(spread, rel=0.1)


def write_traces(folder):
    rows = ["model,client,t_s,rate_rps,iat_cv,fit,fit_a,fit_b"]
    for client in range(12):
        rows += [f"m,{client},{t},{1 / (client + 1)},1.5,Gamma,1,1" for t in (0, 600, 1200)]
    with gzip.open(folder / adapter_eviction.SERVEGEN, "wt") as out:
        out.write("\n".join(rows))
    # The second began first.
    rows = ["app,func,end_timestamp,duration", "a,f,10,1", "a,g,10.5,5", "a,f,12,1"]
    with gzip.open(folder / adapter_eviction.AZURE, "wt") as out:
        out.write("\n".join(rows))


def test_traces_are_in_the_order_of_time(tmp_path):
    write_traces(tmp_path)
    assert azure_2021(tmp_path / adapter_eviction.AZURE)["Azure Functions 2021"] == ["g", "f", "f"]
    (asked,) = servegen(tmp_path / adapter_eviction.SERVEGEN, 2000).values()
    assert len(asked) == pytest.approx(2000, rel=0.1)
    assert asked.count("0") > asked.count("5") > asked.count("11") > 0


@pytest.mark.long
def test_the_command_writes_rows_and_a_plot(tmp_path, monkeypatch, capsys):
    write_traces(tmp_path)
    flags = ["--traces", str(tmp_path), "--out", str(tmp_path / "out"), "--requests", "300"]
    monkeypatch.setattr("sys.argv", ["adapter_eviction", *flags, "--seeds", "2"])
    adapter_eviction.main()
    rows = json.loads((tmp_path / "out/adapter_eviction.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * len(adapter_eviction.SHARES) * len(POLICIES)
    assert (tmp_path / "out/adapter_eviction.png").stat().st_size > 10_000
    assert "ServeGen m mixed 0.1 gdsf" in capsys.readouterr().out
    (tmp_path / adapter_eviction.AZURE).unlink()
    with pytest.raises(SystemExit):
        adapter_eviction.main()
    assert f"has no {adapter_eviction.AZURE}" in capsys.readouterr().err
