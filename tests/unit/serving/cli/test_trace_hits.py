"""Traces of requests: where each finds its adapter, and files that are no traces."""

import gzip
import random

import pytest

from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.placement.tiers import lru_hits, zipf
from serving.cli.trace_hits import TierHits, read_trace, tier_hits


def drawn(count, requests, seed=0):
    weights = [1 / number for number in range(1, count + 1)]
    return random.Random(seed).choices([f"a{n}" for n in range(count)], weights, k=requests)


def looked_up(asked, on_device, on_host, size):
    """The same tiers, with a look at everything for each eviction."""
    ledger, host, device, found = UseLedger(), set(), [], []
    for name in asked:
        found.append("device" if name in device else "host" if name in host else "disk")
        if name not in host and on_host:
            if len(host) >= on_host:
                gone = min(host, key=lambda n: (ledger.value(n, size), ledger.last_use(n)))
                host.remove(gone)
                ledger.evicted(gone, size)
            host.add(name)
        ledger.used(name)
        device = ([*(n for n in device if n != name), name])[-on_device:]
    return tuple(found.count(tier) for tier in ("device", "host", "disk"))


@pytest.mark.parametrize(("on_device", "on_host"), [(3, 10), (5, 5), (2, 0), (40, 40)])
def test_tiers_are_those_of_the_policies(on_device, on_host):
    asked = drawn(40, 3000)  # counts are halved twice
    hits = tier_hits(asked, on_device, on_host, 10**6)
    assert hits[:3] == looked_up(asked, on_device, on_host, 10**6)
    assert hits.first == len(set(asked))


def test_a_small_trace_by_hand():
    asked = ["a", "b", "a", "c", "a", "b", "b"]
    # One slot: `a` and `b` are on the host, where `c`, used once, goes before them.
    assert tier_hits(asked, 1, 2, 10**6) == TierHits(device=1, host=2, disk=4, first=3)


def test_slots_hit_as_predicted_for_zipf():
    asked = drawn(200, 20_000)
    hits = tier_hits(asked, 20, 200, 10**6)
    assert hits.device / len(asked) == pytest.approx(lru_hits(zipf(200, 1.0), 20), abs=0.02)
    assert hits.disk == hits.first


def test_files_with_a_name_in_each_line(tmp_path):
    (tmp_path / "plain").write_text("sql\n\n law@v2 \nsql")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"sql\nlaw@v2\r\nsql\n"))
    for name in ("plain", "packed.gz"):
        assert read_trace(str(tmp_path / name)) == ("sql", "law@v2", "sql")


WRONG = [
    ("empty", b"\n\n", "names no adapter"),
    ("long", b"a\n\n" + b"x" * 5000, "line 3 has over 256"),
    ("bytes", b"a\n\nb\n\xff\xfe\n", "line 4 is no UTF-8"),
    ("cut.gz", gzip.compress(b"a\n" * 99)[:-9], "no whole gzip file"),
    ("plain.gz", b"a\n", "gzip"),
]


@pytest.mark.parametrize(("name", "content", "said"), WRONG, ids=[name for name, *_ in WRONG])
def test_other_files_are_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=said):
        read_trace(str(tmp_path / name))
