"""A loop over a device that answers at once, breaks, or hangs, and requests to it."""

import dataclasses
import time
from types import SimpleNamespace

from support.doubles.loop_doubles import NeverThere, Registry, Runner

from serving.api.request import Request, Share
from serving.api.sampling import Sampling
from serving.engine.loop.live_request import LiveRequest
from serving.engine.loop.loop import EngineLoop
from serving.engine.loop.loop_parts import LoopParts
from serving.engine.metrics.metrics import EngineMetrics
from serving.runtime.compile_counter import CompileCounter
from serving.scheduling.scheduler import Scheduler, SchedulerLimits
from serving.text.structured.grammars import Grammars

LIMITS = SchedulerLimits(
    num_pages=40,
    page_size=4,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_queue=6,
)


class Case:
    """A running loop; `ask` submits and returns the list its deltas go to."""

    def __init__(self, tokenizer, wait_s=60.0, turns=None):
        self.runner, self.residencies, self.registry = Runner(), NeverThere(), Registry()
        self.metrics = EngineMetrics("tiny", 64, {}, 1)
        self.tokenizer = tokenizer
        self.compilations = CompileCounter()
        limits = dataclasses.replace(LIMITS, adapter_wait_s=wait_s)
        self.loop = EngineLoop(
            LoopParts(
                runner=self.runner,
                scheduler=Scheduler(limits, adapters=self.residencies),
                registry=self.registry,
                residencies=self.residencies,
                grammars=Grammars(None),
                metrics=self.metrics,
                compilations=self.compilations,
                chunks_per_step=1,
                turns=turns,
            )
        )
        self.loop.start()

    def ask(self, prompt=(5, 6), adapter=None, on_output=None, tenant="", name="", **sampling):
        deltas = []
        request = Request(
            request_id=name or f"r{len(prompt)}-{time.monotonic_ns()}",
            prompt_ids=tuple(prompt),
            sampling=Sampling(**{"max_tokens": 3, **sampling}),
            adapter=adapter,
            adapter_digest="" if adapter is None else f"digest of {adapter}",
            on_output=on_output or deltas.append,
            arrival_s=time.monotonic(),
            deadline_s=time.monotonic(),
            share=Share(tenant),
        )
        entry = None if adapter is None else SimpleNamespace(name=adapter)
        self.loop.submit(
            request, entry, lambda seqs: LiveRequest(request, seqs, self.tokenizer, self.metrics)
        )
        return request.request_id, deltas
