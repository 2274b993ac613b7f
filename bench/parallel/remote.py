"""An instance over several devices beside a LoRA Server: its answers and the time of a layer.

`python -m bench.parallel remote --devices 2 --out DIR` asks an engine that has its adapters itself,
then one whose experts' adapters are on a LoRA Server of as many ranks, each on a device of its own
behind the instance's (where GPUs are too few they share those of the instance). Experts are whole
on the instance's devices. Answers are compared in every bit; a layer's time is a token's by the
number of layers.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpus import count_gpus
from bench.parallel import bits, served
from bench.parallel.quiet import Quiet
from bench.parallel.shapes import write_config
from serving import Engine
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cluster.server_place import server_spec
from serving.lora_server.group import ServerGroup
from serving.lora_server.instance import ServerAccess
from serving.lora_server.transport import selection

WAIT_S = 5.0  # bound of one exchange
CASES = {"base": [None], "adapters": [f"a{n}" for n in range(served.ADAPTERS)]}


def measure(
    raw: dict[str, Any], devices: int, ranks: int, folder: Path, quiet: Quiet
) -> dict[str, Any]:
    """Return whether answers are equal, and microseconds of a layer with and without the server."""
    model = write_config(folder / "model", raw)
    adapters = served.write_adapters(folder)
    fields: dict[str, Any] = served.engine_fields(raw, devices)
    fields |= {"enable_expert_parallel": True}
    cluster = ClusterConfig(
        lora_server=ranks, placement=f"ep{ranks}-pp1", lora_server_wait_s=WAIT_S
    )
    spec = server_spec(EngineConfig(model=str(model), **fields), cluster)
    assert spec is not None, "a server was asked for"
    first = first_gpu(devices, ranks, count_gpus(os.environ))
    ask = functools.partial(_ask, raw, quiet)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(ServerGroup, spec, first_gpu=first)
        try:
            with Engine(str(model), adapters, **fields) as engine:
                coupled = ask(engine)
        finally:
            group = starting.result()
    try:

        def connect(terms, device):
            return selection.open_client_at(group.places, terms, spec.transport, device=device)

        access = ServerAccess(spec, "bench", group.coordinator, connect, WAIT_S)
        with Engine(str(model), adapters, lora_server=access, **fields) as engine:
            apart = ask(engine)
        stats = [process.stats() for process in group.processes]
    finally:
        group.close()
    return {
        "devices": devices,
        "ranks": ranks,
        "placement": spec.placement,
        "ranks_share_gpus": first == 0,
        "rows": served.ROWS,
        "adapters": served.ADAPTERS,
        "rank": served.RANK,
        "answers": bits.compare(coupled[0], apart[0]),
        "layer_us": {"coupled": coupled[1], "with a LoRA Server": apart[1]},
        "coupled": coupled[0].facts,
        "with a LoRA Server": apart[0].facts,
        "answered_by_ranks": [one["answered"] for one in stats],
        "refused_by_ranks": [one["refused"] for one in stats],
    }


def first_gpu(devices: int, ranks: int, there: int) -> int:
    """Return the first GPU of the ranks: behind the instance's, or its own where there are none.

    Processes that share a GPU take turns of it, so their times say nothing.
    """
    return devices if not there or there >= devices + ranks else 0


def _ask(raw: dict[str, Any], quiet: Quiet, engine: Engine) -> tuple[bits.Run, dict[str, float]]:
    """Return what an engine answers to a mixed batch, and microseconds of a layer."""
    names = [None, *CASES["adapters"]]
    with quiet.busy():
        outputs = bits.outputs_of(engine, raw["vocab_size"], names, served.PROMPT)
    with quiet.alone():
        took = {name: served.token_ms(engine, raw["vocab_size"], n) for name, n in CASES.items()}
    layers = raw["num_hidden_layers"]
    facts = {"compilations_after_warmup": engine.stats().compilations_after_warmup}
    run = bits.Run([bits.answer(output) for output in outputs], facts)
    return run, {name: round(ms * 1e3 / layers, 2) for name, ms in took.items()}
