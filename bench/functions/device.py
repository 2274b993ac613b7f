"""One simulated device: whose prefill runs, who decodes, and what lies in its memory."""

import dataclasses

from bench.functions.times import Model, Times
from serving.functions.policies.offload import NoRoomError, Resident, plan
from serving.functions.policies.predict import Arrivals

EPSILON = 1e-9
PARTS = ("context", "adapter")  # of a function on the device, beside the backbone


@dataclasses.dataclass
class Request:
    """A call: when it came, when its first and last token did."""

    arrival: float
    first: float = 0.0
    last: float = 0.0


@dataclasses.dataclass
class Batch:
    """Requests that run together; `left_s` is what their decoding takes alone."""

    function: "FunctionState"
    requests: list[Request]
    left_s: float


@dataclasses.dataclass
class FunctionState:
    """A function of the simulation."""

    name: str
    model: Model
    arrivals: list[float]
    queue: list[Request] = dataclasses.field(default_factory=list)
    done: list[Request] = dataclasses.field(default_factory=list)
    seen: Arrivals = dataclasses.field(default_factory=Arrivals)  # so far
    there: set[str] = dataclasses.field(default_factory=set)  # of PARTS
    ready_at: float | None = None  # a load is under way until then
    last_used: float = -1e18
    busy_since: float | None = None
    busy: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    active_gb_s: float = 0.0
    idle_gb_s: float = 0.0
    cold: int = 0


class Device:
    """Prefills run alone, one at a time; decoding functions share what is left equally."""

    def __init__(self, functions: list[FunctionState], times: Times):
        self.functions, self.times, self.model = functions, times, functions[0].model
        self.prefill: tuple[Batch, float] | None = None  # and when it ends
        self.decoding: list[Batch] = []
        self.now = 0.0
        self.backbone_at: float | None = None  # from when it is there, or will be
        self.backbone_spans: list[tuple[float, float]] = []
        self.version = 0

    def advance(self, now: float) -> None:
        """Let what runs run until `now`, which is not behind the next event."""
        elapsed = now - self.now
        for function in self.functions:
            gb = (self.own_gb(function) + self.kv_gb(function)) * elapsed
            if function.busy_since is not None:
                function.active_gb_s += gb
            else:
                function.idle_gb_s += gb
        if self.prefill is None and self.decoding:
            each = elapsed / len({batch.function.name for batch in self.decoding})
            for batch in self.decoding:
                batch.left_s -= each
        self.now = now
        if self.prefill is not None and self.prefill[1] <= now + EPSILON:
            batch, _ = self.prefill
            self.prefill = None
            for request in batch.requests:
                request.first = now
            self.decoding.append(batch)
        ended = [batch for batch in self.decoding if batch.left_s <= EPSILON]
        self.decoding = [batch for batch in self.decoding if batch.left_s > EPSILON]
        for batch in ended:
            for request in batch.requests:
                request.last = now
            batch.function.done += batch.requests
            self._rest(batch.function)

    def next_event(self) -> float:
        """Return when a prefill or a decoding ends by itself; inf where nothing runs."""
        if self.prefill is not None:
            return self.prefill[1]
        if not self.decoding:
            return float("inf")
        turns = len({batch.function.name for batch in self.decoding})
        return self.now + min(batch.left_s for batch in self.decoding) * turns

    def start(self, function: FunctionState, count: int) -> None:
        """Take so many requests of a function for a prefill."""
        batch = Batch(
            function,
            function.queue[:count],
            (self.times.answer_tokens - 1) * function.model.decode_step_s,
        )
        del function.queue[:count]
        self.prefill = batch, self.now + function.model.prefill.seconds(count)

    def runs(self, function: FunctionState) -> bool:
        """Say whether a request of the function waits or runs."""
        return bool(function.queue) or any(b.function is function for b in self._batches())

    def kv_gb(self, function: FunctionState) -> float:
        """Return the KV memory of a function's requests that run."""
        batches = [batch for batch in self._batches() if batch.function is function]
        return sum(len(batch.requests) for batch in batches) * self.model.kv_gb

    def running_gb(self) -> float:
        """Return the KV memory of all requests that run."""
        return sum(len(batch.requests) for batch in self._batches()) * self.model.kv_gb

    def _batches(self) -> list[Batch]:
        return [*self.decoding, *([self.prefill[0]] if self.prefill else [])]

    def own_gb(self, function: FunctionState) -> float:
        """Return the device memory of a function's own parts."""
        sizes = {"context": self.times.context_gb, "adapter": self.times.adapter_gb}
        return sum(sizes[part] for part in function.there)

    def free_gb(self) -> float:
        """Return what nothing occupies."""
        held = sum(self.own_gb(function) for function in self.functions)
        backbone = self.model.backbone_gb if self.backbone_at is not None else 0.0
        return self.times.device_gb - held - backbone - self.running_gb()

    def make_room(self, need_gb: float, values: dict[str, float], asker: FunctionState) -> bool:
        """Offload idle functions' parts until so much is free; False: they are not enough."""
        short = need_gb - self.free_gb()
        if short <= 0:
            return True
        sizes = {"context": self.times.context_gb, "adapter": self.times.adapter_gb}
        residents = [
            Resident(f"{part} {f.name}", int(sizes[part] * 1e9), values.get(f.name, 0.0))
            for f in self.functions
            if f is not asker and not self.runs(f) and f.ready_at is None
            for part in f.there
        ]
        try:
            gone = plan(residents, int(short * 1e9) + 1)
        except NoRoomError:
            return False
        named = {function.name: function for function in self.functions}
        for name in gone:
            part, _, function = name.partition(" ")
            named[function].there.discard(part)
        return True

    def drop_backbone(self) -> None:
        """Free the backbone's memory."""
        if self.backbone_at is not None:
            self.backbone_spans.append((min(self.backbone_at, self.now), self.now))
            self.backbone_at = None

    def _rest(self, function: FunctionState) -> None:
        """Note the end of a busy span where nothing of the function is left to do."""
        function.last_used = self.now
        if not self.runs(function) and function.busy_since is not None:
            function.busy.append((function.busy_since, self.now))
            function.busy_since = None
