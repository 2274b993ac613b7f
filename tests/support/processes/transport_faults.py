"""Killing a server while its client waits, again and again; for every transport of processes."""

import contextlib
import os
import threading
from collections import Counter

import jax
import numpy as np
from support.cases.transport_cases import LONG, batch, bits, exchange, terms_of, want_ys
from support.waiting import wait_until

from serving.lora_server.transport.base import Status


def held_by_this_process() -> frozenset[object]:
    """What must not become more: descriptors, mappings of slots, threads."""
    held: set[object] = {*threading.enumerate()}
    sizes: Counter[int] = Counter()
    with open("/proc/self/maps") as file:
        for line in file:
            if "lora_jax_transport" in line:
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                sizes[end - start] += 1
                # Each life of a server has new memory, which need not lie where the last one's did.
                held.add(("mapping", end - start, sizes[end - start]))
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            held.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return frozenset(held)


def wait_given_back(before: frozenset[object]) -> None:
    """Return when this process holds nothing that it did not hold before.

    Threads of a transport may end a moment after the word that they do, and others' at any time.
    """
    wait_until(lambda: held_by_this_process() <= before)


def killed_in_the_middle(peers, client, where, step, arrays):
    """One life of a server: joined anew, two answers, then killed while it holds a third."""
    x, ys, rows = arrays
    pid = peers.start("serve", where, 0, 1, 3)
    peers.expect("listening")
    wait_until(lambda: client.rejoin() == ())  # one try may be too short on a busy machine
    wanted = want_ys(terms_of(ep=1).shapes, 0, 1, x, ys, rows)
    for _ in range(2):
        got, status = step(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.ARRIVED]
        assert [bits(y) for y in got] == [bits(y) for y in wanted]
    results = []
    waiter = threading.Thread(
        target=lambda: results.append(jax.block_until_ready(step(x, ys, rows)))
    )
    waiter.start()
    peers.expect("held")
    peers.kill(pid)
    waiter.join(LONG)
    got, status = results[0]
    assert np.asarray(status).tolist() == [Status.ABORTED]
    assert [bits(y) for y in got] == [bits(y) for y in ys]
    assert client.lost() == (0,)
    assert client.rejoin() == (0,)


def kill_servers(peers, where, connect, times):
    """Kill servers at one address; `connect` gives a client of the first, of the terms ep=1."""
    pid = peers.start("serve", where, 0, 1, 0)
    where = peers.expect("listening")[1]
    client = connect(where)
    client.set_limit(1000.0)  # so that nothing but the death itself ends a wait
    peers.kill(pid)
    wait_until(lambda: client.lost() == (0,))
    arrays = batch(terms_of(ep=1), np.random.default_rng(0), 24, base_share=0.2)
    step = exchange(client)
    killed_in_the_middle(peers, client, where, step, arrays)
    before = held_by_this_process()
    for _ in range(times):
        killed_in_the_middle(peers, client, where, step, arrays)
    wait_given_back(before)
    client.close()
