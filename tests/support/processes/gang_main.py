"""A member of an instance over hosts: `gang_main.py FILE`, JSON of the place, config and requests.

Rank 0 writes its answers to the file named `answers`.
"""

import json
import os
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")

from support.doubles.paying_drafts import num_drafts, send_all_drafts  # noqa: E402

from serving import Engine, Sampling  # noqa: E402
from serving.api.config import EngineConfig  # noqa: E402
from serving.engine.parts.following import follow  # noqa: E402
from serving.runtime.about import about_of  # noqa: E402
from serving.runtime.gang import Gang  # noqa: E402
from serving.runtime.gang_stream import GangPlace  # noqa: E402

put, served = jax.device_put, []


def put_here(x, device=None, **more):
    """As jax.device_put, which would compare values over all processes, on devices of this one."""
    assert not served or getattr(device, "is_fully_addressable", True), "put beside requests"
    return put(x, device, **more)


def serve(gang):
    """As Gang.serve; from now on requests run."""
    served.append(gang)
    begin(gang)


jax.device_put, begin, Gang.serve = put_here, Gang.serve, serve


def answers(engine, asked):
    """Return what the requests get, and that a reloaded adapter answers as before."""
    samplings = [Sampling(**fields) for fields in asked["samplings"]]
    speculates = engine.config.speculation is not None
    if speculates:
        send_all_drafts(engine)
    outputs = engine.generate(asked["prompts"], asked["adapters"], samplings)
    name, folder = asked["again"]
    engine.load_adapter(name, folder, replace=True)
    outputs += engine.generate(asked["prompts"][:2], name, samplings[0])
    labels = [engine.classify(asked["prompts"][:2], name)[0].outputs for name in asked["heads"]]
    assert engine.stats().compilations_after_warmup == 0
    if speculates:  # each alone: beside others its drafts depend on their times
        for place in range(-3, 0):
            one = asked["prompts"][place], asked["adapters"][place], samplings[place]
            outputs += engine.generate(*one)
        assert num_drafts(engine)[2] > 0
    return [[repr(one)] for one in labels] + [
        [o.outputs[0].token_ids, repr(o.outputs[0].logprobs), repr(o.prompt_logprobs)]
        for o in outputs
    ]


def main(asked, rank):
    config = EngineConfig(**asked["config"])
    gang = None
    if rank is not None:
        address = ("127.0.0.1", asked["port"])
        place = GangPlace(rank, asked["size"], address, bytes.fromhex(asked["secret"]), 120.0)
        gang = Gang(place, about_of(config))
    if rank:
        follow(config, gang)
        os._exit(0)
    with Engine(adapters=asked["modules"], gang=gang, **asked["config"]) as engine:
        found = answers(engine, asked)
    Path(asked["answers"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]) if sys.argv[2:] else None)
