"""Systems that the simulator models, as switches; a baseline is a model of its idea, not itself."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class System:
    """Policies of a simulated system.

    Attributes:
        name: in tables.
        shares: one backbone per model for all of its functions, else one per function.
        preloads: artifacts are loaded before they are asked for, by `policies.preload`.
        offloads: idle artifacts leave a device that is too full, by `policies.offload`.
        fixed_batch: (size, seconds) in place of `policies.batching`.
        always_on: all is resident all the time and paid for; no cold starts.
        one_engine: with `always_on`, functions of a model are rows of one batch, not turns.
    """

    name: str
    shares: bool = True
    preloads: bool = True
    offloads: bool = True
    fixed_batch: tuple[int, float] | None = None
    always_on: bool = False
    one_engine: bool = False


SYSTEMS = (
    System("functions"),
    System("model of serverless, private weights", shares=False, preloads=False, offloads=False),
    System("model of serverless, private weights, pre-loaded", shares=False),
    System("model of an engine per adapter", shares=False, always_on=True),
    System("model of one shared engine", always_on=True, one_engine=True),
)
ABLATIONS = (
    System("functions"),
    System("without sharing", shares=False),
    System("without pre-loading", preloads=False),
    System("without offloading", offloads=False),
    System("batches of 1", fixed_batch=(1, 0.0)),
    System("batches of 10, 0.5 s", fixed_batch=(10, 0.5)),
    System("batches of 20, 1 s", fixed_batch=(20, 1.0)),
)
