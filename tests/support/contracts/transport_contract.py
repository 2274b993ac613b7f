"""Contract of every transport; a transport's test file inherits it."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from support.cases.transport_cases import (
    DTYPES,
    HIDDEN,
    LAYERS,
    LONG,
    MAX_ROWS,
    batch,
    bits,
    connected,
    exact_deltas,
    exchange,
    open_client,
    open_servers,
    serving,
    terms_of,
    want_ys,
)
from support.waiting import wait_until

from serving.lora_server.transport.base import Status
from serving.lora_server.transport.shapes import DOWN, GATE_UP


def plan_cases(*some: tuple[int, int]) -> list:
    """Return plans with numbers of rows; all but `some` (place of a plan, rows) are long."""
    return [
        pytest.param(plan, rows, marks=() if (place, rows) in some else pytest.mark.long)
        for rows in (1, 3, 17)
        for place, plan in enumerate(({"ep": 1}, {"ep": 2, "pp": 2}, {"ep": 1, "dp": 3}))
    ]


class TransportContract:
    transport: str
    calls_of_a_push = 1  # custom calls, of which each gives x back
    waits_beside = 0  # that may have begun while the base computes

    @pytest.mark.parametrize(
        ("site", "dtype", "delta"),
        [
            *((GATE_UP, *dtypes) for dtypes in DTYPES),
            *(pytest.param(DOWN, *dtypes, marks=pytest.mark.long) for dtypes in DTYPES[:-1]),
            (DOWN, *DTYPES[-1]),
        ],
    )
    def test_exact_bytes_both_ways(self, tmp_path, dtype, delta, site):
        terms = terms_of(dtype, delta)
        rng = np.random.default_rng(site)
        with connected(self.transport, terms, tmp_path) as (client, servers):
            step = exchange(client, site, layer=2)
            for num_real in (24, 0, 1, 2, 23, *rng.integers(0, 24, 20)):
                share = rng.choice([0.0, 0.3, 0.9, 1.0])
                x, ys, rows = batch(terms, rng, 24, site, 2, num_real, share)
                got, status = step(x, ys, rows)
                assert not np.asarray(status).any()
                wanted = want_ys(terms.shapes, site, 2, x, ys, rows)
                assert [bits(y) for y in got] == [bits(y) for y in wanted]
            assert sum(server.dropped() for server in servers) == 0
            stats = client.stats()
            assert stats.waits == stats.pushes > 20
            assert 0 < stats.wait_quantile(0.5) <= 2 * stats.longest_wait
            assert 0 < sum(stats.waits_by_length) <= stats.waits

    @pytest.mark.parametrize(("plan", "num_rows"), plan_cases((0, 1), (1, 17), (2, 3)))
    def test_every_plan_brings_the_same_rows(self, tmp_path, plan, num_rows):
        terms = terms_of("bfloat16", **plan)
        rng = np.random.default_rng(num_rows)
        seen = []

        def compute(request):
            seen.append((request.layer, request.site))
            return exact_deltas(request, terms.shapes)

        with connected(self.transport, terms, tmp_path, compute) as (client, _):
            for layer in range(LAYERS):
                x, ys, rows = batch(terms, rng, num_rows, GATE_UP, layer, base_share=0.0)
                got, status = exchange(client, GATE_UP, layer)(x, ys, rows)
                assert not np.asarray(status).any()
                wanted = want_ys(terms.shapes, GATE_UP, layer, x, ys, rows)
                assert [bits(y) for y in got] == [bits(y) for y in wanted]
            servers = {int(s) for s in np.asarray(rows.row_to_server)}
            assert servers <= set(terms.placement.group_of(LAYERS - 1))
        assert {layer for layer, _ in seen} == set(range(LAYERS))

    def test_rows_of_the_base_alone_send_nothing(self, tmp_path):
        terms = terms_of()
        with open_servers(self.transport, terms, tmp_path) as servers:  # nobody would answer
            client = open_client(self.transport, terms, servers, tmp_path)
            x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=1.0)
            ys = (ys[0].at[0, 0].set(-0.0), ys[1])
            got, status = exchange(client)(x, ys, rows)
            assert [bits(y) for y in got] == [bits(y) for y in ys]
            stats = client.stats()
            assert (stats.pushes, stats.waits, np.asarray(status).tolist()) == (0, 0, [0, 0])
            client.close()

    def test_push_then_computation_then_wait(self, tmp_path):
        """While the base computes, the server has the rows and the program does not wait yet."""
        terms = terms_of(ep=1)
        received, done = threading.Event(), []

        def compute(request):
            received.set()
            return exact_deltas(request, terms.shapes)

        def base(x):
            arrived = received.wait(LONG)
            received.clear()
            done.append((arrived, client.stats().pushes, client.stats().waits))
            return x

        @jax.jit
        def step(x, down, rows):
            for layer in range(3):
                x = client.push(x, GATE_UP, layer, rows)
                base_x = io_callback(base, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
                ys = (base_x[:, :12], base_x[:, -12:])
                (gate, up), _ = client.wait_add(ys, x, GATE_UP, rows)
                inner = client.push(gate * up, DOWN, layer, rows)
                base_inner = io_callback(base, jax.ShapeDtypeStruct(inner.shape, x.dtype), inner)
                (x,), status = client.wait_add((base_inner[:, :1] + down,), inner, DOWN, rows)
            return x, status

        with connected(self.transport, terms, tmp_path, compute) as (client, _):
            x, _, rows = batch(terms, np.random.default_rng(0), 8, base_share=0.0)
            down = jnp.zeros((8, HIDDEN), jnp.float32)
            _, status = jax.block_until_ready(step(x, down, rows))
            assert np.asarray(status).tolist() == [0]
        assert [seen[:2] for seen in done] == [(True, count + 1) for count in range(6)]
        assert all(0 <= waits - n <= self.waits_beside for n, (_, _, waits) in enumerate(done))

    def test_compiled_calls_work_in_place(self, tmp_path):
        terms = terms_of()
        with open_servers(self.transport, terms, tmp_path) as servers:
            client = open_client(self.transport, terms, servers, tmp_path)
            x, ys, rows = batch(terms, np.random.default_rng(0), 24)
            text = exchange(client).lower(x, ys, rows).compile().as_text()
            client.close()
        calls = [line for line in text.splitlines() if "custom-call(" in line]
        *pushes, wait = [line.split("output_to_operand_aliasing=")[1] for line in calls]
        assert len(pushes) == self.calls_of_a_push
        assert all(alias.startswith("{{}: (0, {})}") for alias in pushes)
        assert wait.startswith("{{1}: (3, {}), {2}: (4, {})}")

    def test_a_silent_server_is_waited_for_once_and_no_bit_changes(self, tmp_path):
        terms = terms_of("bfloat16")
        with open_servers(self.transport, terms, tmp_path) as servers:
            client = open_client(self.transport, terms, servers, tmp_path)
            client.set_limit(0.05)
            answers = serving(servers[1], lambda r: exact_deltas(r, terms.shapes))
            step = exchange(client)
            x, ys, rows = batch(terms, np.random.default_rng(1), 24, base_share=0.0)
            with answers:
                start = time.monotonic()
                got, status = jax.block_until_ready(step(x, ys, rows))
                assert time.monotonic() - start >= 0.05
                assert np.asarray(status)[0] == Status.TIMED_OUT
                assert [bits(y) for y in got] == [bits(y) for y in ys]
                assert 0 in client.lost()
                client.set_limit(1000.0)  # or it would be waited for a second time
                got, status = jax.block_until_ready(step(x, ys, rows))
            assert np.asarray(status)[0] == Status.ABORTED
            assert [bits(y) for y in got] == [bits(y) for y in ys]
            assert client.stats().timed_out >= 1
            client.close()

    def test_abort_ends_a_wait(self, tmp_path):
        terms = terms_of(ep=1)
        with open_servers(self.transport, terms, tmp_path) as servers:
            client = open_client(self.transport, terms, servers, tmp_path)
            client.set_limit(1000.0)
            x, ys, rows = batch(terms, np.random.default_rng(1), 24, base_share=0.0)
            step, results = exchange(client), []
            thread = threading.Thread(
                target=lambda: results.append(jax.block_until_ready(step(x, ys, rows)))
            )
            thread.start()
            wait_until(lambda: client.stats().waits == 1)
            client.abort()
            thread.join(LONG)
            got, status = results[0]
            assert np.asarray(status).tolist() == [Status.ABORTED]
            assert [bits(y) for y in got] == [bits(y) for y in ys]
            client.abort(False)
            assert client.lost() == (0,)
            wait_until(lambda: client.rejoin() == ())  # one try may be too short on a busy machine
            with serving(servers[0], lambda r: exact_deltas(r, terms.shapes)):
                assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.ARRIVED]
            client.close()

    def test_a_refusal_fails_one_exchange_and_loses_nothing(self, tmp_path):
        terms = terms_of()

        def compute(request):
            if request.layer == 0:
                return None
            return exact_deltas(request, terms.shapes)

        with connected(self.transport, terms, tmp_path, compute) as (client, _):
            x, ys, rows = batch(terms, np.random.default_rng(1), 24, base_share=0.0)
            got, status = exchange(client, GATE_UP, 0)(x, ys, rows)
            assert set(np.asarray(status).tolist()) == {Status.REFUSED}
            assert [bits(y) for y in got] == [bits(y) for y in ys]
            assert client.lost() == ()
            _, status = exchange(client, GATE_UP, 1)(x, ys, rows)
            assert not np.asarray(status).any()
            assert client.stats().refused == 2

    def test_two_clients_on_one_server(self, tmp_path):
        terms = terms_of("bfloat16", ep=1)
        served = []

        def compute(request):
            served.append(request.client)
            return exact_deltas(request, terms.shapes)

        def run(number):
            rng = np.random.default_rng(number)
            step = exchange(clients[number], DOWN, number)
            for _ in range(20):
                x, ys, rows = batch(terms, rng, 24, DOWN, number, base_share=0.0)
                got, status = step(x, ys, rows)
                assert not np.asarray(status).any()
                wanted = want_ys(terms.shapes, DOWN, number, x, ys, rows)
                assert [bits(y) for y in got] == [bits(y) for y in wanted]
            finished.append(number)

        finished: list[int] = []
        with connected(self.transport, terms, tmp_path, compute) as (first, servers):
            second = open_client(self.transport, terms, servers, tmp_path)
            clients = [first, second]
            assert len(servers[0].clients()) == 2
            threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            assert sorted(finished) == [0, 1]
            second.close()
            wait_until(lambda: len(servers[0].clients()) == 1)
        assert len(served) == 40
        assert len(set(served)) == 2

    def test_nothing_is_sent_after_close(self, tmp_path):
        terms = terms_of(ep=1)
        with connected(self.transport, terms, tmp_path) as (client, servers):
            x, ys, rows = batch(terms, np.random.default_rng(1), 24, base_share=0.0)
            step = exchange(client)
            assert not np.asarray(step(x, ys, rows)[1]).any()
            client.close()
            client.close()
            wait_until(lambda: servers[0].clients() == ())
            got, status = step(x, ys, rows)
            assert np.asarray(status).tolist() == [Status.ABORTED]
            assert [bits(y) for y in got] == [bits(y) for y in ys]

    def test_pull_brings_the_same(self, tmp_path):
        terms = terms_of("bfloat16")
        with connected(self.transport, terms, tmp_path, pull=True) as (client, _):
            x, ys, rows = batch(terms, np.random.default_rng(1), MAX_ROWS, layer=3)
            got, _ = exchange(client, GATE_UP, 3)(x, ys, rows)
            wanted = want_ys(terms.shapes, GATE_UP, 3, x, ys, rows)
            assert [bits(y) for y in got] == [bits(y) for y in wanted]
