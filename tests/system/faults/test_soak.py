"""A server under mixed traffic for an hour keeps its memory, its descriptors and its answers.

`make soak SECONDS_OF_SOAK=600` runs it for another time. SOAK_PAUSE_S is the bar of /health: 0.2 s
is the promise on a quiet machine of two cores; the default leaves room for clients on the same.
"""

import os

import pytest
from fault_checker import violations
from fault_cluster import FIXED, MODEL, SIZES
from fault_history import Recorder
from soak import Sample, growth, probing, soak
from support.processes.server_process import serve_process

SECONDS = float(os.environ.get("SOAK_SECONDS", "3600"))
PAUSE_S = float(os.environ.get("SOAK_PAUSE_S", "1.0"))
SERVICE_S = 30.0  # of a request among others
MORE_RSS_MB, MORE_DESCRIPTORS, MORE_THREADS = 64, 16, 8


def test_growth_is_that_of_the_medians():
    samples = [Sample(float(n), 100.0 + n, 10 + (n == 99), 5) for n in range(100)]
    assert growth(samples, "rss_mb") == 50
    assert growth(samples, "descriptors") == 0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_soak(fault_answers, tmp_path):
    adapters = MODEL / "adapters"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    modules = ["--lora-modules", *(f"{name}={adapters / name}" for name in FIXED)]
    runtime = ["--enable-runtime-lora", "--lora-dir", str(adapters)]
    log = tmp_path / "log"
    recorder, pauses = Recorder(), []
    with serve_process(str(MODEL), *sizes, *runtime, *modules, log=log) as (process, port):
        with probing(port, pauses):
            samples, nuisance = soak(process.pid, port, SECONDS, recorder)
        assert process.poll() is None
    operations = recorder.take()
    print(
        f"{len(operations)} operations, {nuisance.done}, /health at most {pauses[:3]}, growth: "
        f"{growth(samples, 'rss_mb'):.1f} MB to {samples[-1].rss_mb:.0f} MB, "
        f"{growth(samples, 'descriptors')} descriptors, {growth(samples, 'threads')} threads"
    )
    fixed = {"base": "base"} | {name: name for name in FIXED}
    found = violations(operations, [], fault_answers, fixed, SERVICE_S)
    assert not found, "\n".join([f"{len(found)}:", *found[:20]])
    assert growth(samples, "rss_mb") <= MORE_RSS_MB
    assert growth(samples, "descriptors") <= MORE_DESCRIPTORS
    assert growth(samples, "threads") <= MORE_THREADS
    assert pauses[0] <= PAUSE_S
    assert all(nuisance.done.values())
    assert "Traceback" not in log.read_text()
