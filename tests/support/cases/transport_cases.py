"""Small channels, a server's arithmetic that is exact, and what a client must then see."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.transport import in_process, shared_memory
from serving.lora_server.transport.base import PushRows, push_rows
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.hosts import tcp
from serving.lora_server.transport.serve import serve
from serving.lora_server.transport.shapes import GATE_UP, moe_shapes

LAYERS, EXPERTS, MAX_ROWS, HIDDEN, WIDTH = 4, 4, 24, 20, 12
LONG = 60.0  # seconds: for waits that must end by themselves
SECRET = b"0123456789abcdef"
DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


def terms_of(dtype="float32", delta="float32", ep=2, pp=1, dp=1, base="tiny", max_rows=MAX_ROWS):
    placement = ServerLayout(AdapterShape(8, LAYERS, EXPERTS, 1), ep=ep, pp=pp, dp=dp)
    return Terms(base, placement, moe_shapes(LAYERS, max_rows, HIDDEN, WIDTH, dtype, delta))


def exact_deltas(request, shapes):
    """What the servers here compute: a function of everything that travels."""
    return deltas_of(
        shapes, request.site, request.layer, request.x, request.adapters, request.experts
    )


def deltas_of(shapes, site, layer, x, adapters, experts):
    wide = np.asarray(x, np.float32)
    per_row = (adapters * 0.5 + experts * 0.25 + layer).astype(np.float32)[:, None]
    return [
        (np.resize(wide.T, (d_out, len(wide))).T * np.float32(k + 1) + per_row).astype(
            shapes.result_dtype
        )
        for k, d_out in enumerate(shapes.sites[site].d_outs)
    ]


def want_ys(shapes, site, layer, x, ys, rows):
    """y + delta, summed in float32 and rounded once; the other rows as they are, bit for bit."""
    travels = np.asarray(rows.row_to_server) >= 0
    travels &= np.arange(len(travels)) < int(rows.num_rows)
    deltas = deltas_of(
        shapes, site, layer, x, np.asarray(rows.row_to_adapter), np.asarray(rows.row_to_expert)
    )
    wanted = []
    for y, delta in zip(ys, deltas, strict=True):
        total = (np.asarray(y, np.float32) + np.asarray(delta, np.float32)).astype(y.dtype)
        wanted.append(np.where(travels[:, None], total, np.asarray(y)))
    return wanted


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def batch(terms, rng, num_rows, site=GATE_UP, layer=1, num_real=None, base_share=0.3):
    """Return (x, ys, rows) of one exchange; rows sorted by expert, some without an adapter."""
    spec, dtype = terms.shapes.sites[site], terms.shapes.row_dtype
    x = jnp.asarray(rng.standard_normal((num_rows, spec.d_in)), dtype)
    ys = tuple(jnp.asarray(rng.standard_normal((num_rows, d)), dtype) for d in spec.d_outs)
    adapters = rng.integers(0, 8, num_rows)
    adapters[rng.random(num_rows) < base_share] = -1
    rows = push_rows(
        terms.placement,
        layer,
        jnp.asarray(adapters, jnp.int32),
        jnp.asarray(np.sort(rng.integers(0, EXPERTS, num_rows)), jnp.int32),
        jnp.int32(num_rows if num_real is None else num_real),
        jnp.int32(3),
    )
    return x, ys, rows


def exchange(client, site=GATE_UP, layer=1):
    """Return a compiled push and wait_add of one site."""

    @jax.jit
    def step(x, ys, rows: PushRows):
        x = client.push(x, site, layer, rows)
        return client.wait_add(ys, x, site, rows)

    return step


@contextlib.contextmanager
def serving(server, compute):
    """Run a server's loop on a thread, and end it."""
    failed = []

    def loop():
        try:
            serve(server, compute)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield server
    finally:
        server.abort()
        thread.join(LONG)
        assert not thread.is_alive()
    assert not failed, failed


@contextlib.contextmanager
def open_servers(transport, terms, folder, **options):
    """Yield the plan's servers without loops.

    A transport is a name, or an object that opens servers and clients (peer_double).
    """
    servers = []
    try:
        for rank in range(terms.placement.devices):
            if not isinstance(transport, str):
                servers.append(transport.open_server(terms, rank, folder, **options))
            elif transport == "in_process":
                servers.append(in_process.open_server(terms.shapes, **options))
            elif transport == "tcp":
                listening = tcp.listen("127.0.0.1", 0)
                (folder / f"rank-{rank}.port").write_text(str(listening.getsockname()[1]))
                servers.append(tcp.open_server(listening, terms, rank, SECRET, **options))
            else:
                path = folder / f"rank-{rank}.sock"
                servers.append(shared_memory.open_server(path, terms, rank, **options))
        yield servers
    finally:
        for server in servers:
            server.close()


def open_client(transport, terms, servers, folder, **options):
    if not isinstance(transport, str):
        client = transport.open_client(terms, servers, folder, **options)
    elif transport == "in_process":
        client = in_process.open_client(servers, **options)
    elif transport == "tcp":
        ports = [int((folder / f"rank-{n}.port").read_text()) for n in range(len(servers))]
        addresses = [("127.0.0.1", port) for port in ports]
        client = tcp.open_client(addresses, terms, SECRET, **options)
    else:
        paths = [folder / f"rank-{rank}.sock" for rank in range(len(servers))]
        client = shared_memory.open_client(paths, terms, **options)
    client.set_limit(LONG)
    return client


@contextlib.contextmanager
def connected(transport, terms, folder, compute=None, **options):
    """Yield (client, servers); every server answers by `compute`, else by exact_deltas."""
    compute = compute or (lambda request: exact_deltas(request, terms.shapes))
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(open_servers(transport, terms, folder, **options))
        for server in servers:
            stack.enter_context(serving(server, compute))
        client = open_client(transport, terms, servers, folder, **options)
        stack.callback(client.close)
        yield client, servers
