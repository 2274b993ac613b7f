"""Instances behind the router under load, and beside a LoRA Server: the bench itself."""

import http.server
import itertools
import json
import threading
import time

import pytest

from bench.parallel import arrivals, cluster, remote, shapes
from bench.parallel.arrivals import Load, Told
from bench.parallel.quiet import Quiet
from serving.cli.flags import build_parser
from serving.engine.parts.devices import make_cpu_devices

LOAD = Load(rate=40.0, seconds=0.5, prompt=5, answer=3, names=("base", "a0"), vocab=64)
WAIT_S = 0.3


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers as a server of completions does, each request after a while."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if len(self.server.asked) == self.server.wanted:
            self.server.all_have_come.set()
        assert self.server.all_have_come.wait(60)
        time.sleep(WAIT_S)
        if asked["model"] == self.server.refused:
            self.send_error(404, "no such model")
            return
        self.send_response(200)
        self.end_headers()
        for place in range(asked["max_tokens"]):
            self._event({"choices": [{"text": f"w{place} "}]})
        self._event({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, told):
        self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())

    def log_message(self, format, *args):
        """Say nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as made:
        made.asked, made.refused, made.wanted = [], "", len(arrivals.arrivals(LOAD))
        made.all_have_come = threading.Event()
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_every_server_is_asked_the_same_at_random_times():
    asked = arrivals.arrivals(LOAD)
    assert asked == arrivals.arrivals(LOAD)
    assert 8 < len(asked) < 40  # 20 expected
    assert {one.name for one in asked} == set(LOAD.names)
    assert all(one.at < LOAD.seconds and len(one.prompt) == 5 for one in asked)
    long = arrivals.arrivals(Load(100.0, 50.0, 1, 1, ("base",), 64))
    gaps = [b.at - a.at for a, b in itertools.pairwise(long)]
    mean = sum(gaps) / len(gaps)
    assert 0.009 < mean < 0.011
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < spread / mean**2 < 1.25  # of an exponential distribution: 1


def test_no_request_waits_for_the_answer_to_another(server):
    """None is answered before the last one has come."""
    row = arrivals.serve(server.server_address[1], LOAD)
    assert len(server.asked) == row["requests"] == server.wanted
    assert row["ttft_p50_ms"] >= WAIT_S * 1e3
    assert row["events_a_request"] == LOAD.answer
    assert all(body["ignore_eos"] and body["stream"] for body in server.asked)


def test_a_refused_request_is_an_error(server):
    server.refused = "a0"
    with pytest.raises(RuntimeError, match="404"):
        arrivals.serve(server.server_address[1], LOAD)


def test_figures_count_from_when_a_request_was_due():
    told = [Told(1.0, 1.25, [2.0, 2.5, 3.0], 3), Told(2.0, 2.0, [2.5, 2.75, 4.0], 3)]
    row = arrivals.figures(told, LOAD)
    assert row["ttft_p50_ms"] == 750  # of 1000 and 500
    assert row["between_tokens_p50_ms"] == 500
    assert row["tpot_p50_ms"] == 625  # of 500 and 750
    assert row["generator_late_ms"] == 250
    assert row["output_tokens_per_s"] == 1.5


def test_the_servers_take_the_flags():
    given = cluster.flags_of(shapes.QWEN3_30B, 2, 2, ("a0=/x",), prompt=256, answer=64)
    parsed = build_parser().parse_args(["model", *given])
    assert (parsed.instances, parsed.tensor_parallel_size) == (2, 2)
    assert parsed.max_model_len >= 320


@pytest.mark.long
def test_both_systems_of_a_tiny_model_answer(tmp_path):
    raw = shapes.tiny(shapes.QWEN3_30B)
    found = cluster.measure(raw, 2, tmp_path, Quiet(None), tmp_path / "logs", tiny=True)
    systems = [row["system"] for row in found["loads"]]
    assert systems == ["TP 2", "TP 1 x DP 2"]
    assert len({row["requests"] for row in found["loads"]}) == 1


@pytest.mark.long
def test_an_instance_of_two_devices_answers_as_one_with_its_adapters(tmp_path):
    make_cpu_devices(2)
    found = remote.measure(shapes.tiny(shapes.QWEN3_30B), 2, 2, tmp_path, Quiet(None))
    assert found["answers"]["equal"]
    assert all(found["answered_by_ranks"])
    assert not any(found["refused_by_ranks"])
    assert found["with a LoRA Server"]["compilations_after_warmup"] == 0
