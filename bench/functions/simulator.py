"""Discrete-event simulation of functions on devices; the decisions are the product's own policies.

A function's cold start loads what is missing, one part after the other: libraries (a fork where a
zygote has them), backbone, adapter, context. Requests wait, leave as batches, and run on a device.
"""

import heapq
import itertools
from typing import Any

from bench.functions.device import EPSILON, PARTS, Device, FunctionState, Request
from bench.functions.systems import System
from bench.functions.times import Model, Times
from serving.functions.policies import batching, preload, turns
from serving.functions.policies.artifacts import Artifact, Place

PLAN_S = 10.0  # between two plans of pre-loading
_GB = 10**9


class Simulation:
    """One run of a system over arrivals."""

    def __init__(self, system: System, times: Times, functions: list[FunctionState]):
        """`functions` are in order of the models; those of one model may share a device."""
        self.system, self.times = system, times
        self.functions = functions
        self.devices = [Device(group, times) for group in _groups(system, times, functions)]
        self.of = {f.name: device for device in self.devices for f in device.functions}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Any, Any]] = []
        self._in_host: set[str] = set()
        self._known = {  # artifacts by a device's first function
            device.functions[0].name: [
                *(a for f in device.functions for a in self._artifacts(f)),
                self._backbone(device.model, device.functions),
            ]
            for device in self.devices
        }
        self._planned: dict[str, tuple[Any, list[preload.Load]]] = {}
        # Seconds of loads that requests waited for, by part: figure 9 of the paper.
        self.load_s = dict.fromkeys(("libraries", "context", "backbone", "adapter"), 0.0)

    def run(self, seconds: float) -> None:
        """Simulate all arrivals until their last token; plans are made for so many seconds."""
        for function in self.functions:
            for arrival in function.arrivals:
                self._push(arrival, "arrival", function)
        if self.system.always_on:
            for device in self.devices:
                device.backbone_at = 0.0
                for function in device.functions:
                    function.there = set(PARTS)
        else:
            for tick in range(int(seconds / PLAN_S)):
                self._push(tick * PLAN_S, "plan", None)
        while self._events:
            now, _, kind, subject = heapq.heappop(self._events)
            self.now = now
            if kind == "plan":
                for device in self.devices:
                    device.advance(now)
                    self._plan(device)
                    self._schedule(device)
                continue
            device, version = (self.of[subject.name], None) if kind != "device" else subject
            if version is not None and version != device.version:
                continue
            device.advance(now)
            if kind == "arrival":
                self._arrive(device, subject)
            elif kind == "loaded" and subject.ready_at is not None:
                subject.ready_at = None if subject.ready_at <= now + EPSILON else subject.ready_at
            self._schedule(device)
        for device in self.devices:
            device.advance(max(self.now, seconds))
            device.drop_backbone()

    def _push(self, moment: float, kind: str, subject: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._order), kind, subject))

    def _arrive(self, device: Device, function: FunctionState) -> None:
        function.queue.append(Request(self.now))
        function.seen.add(self.now)
        if function.busy_since is None:
            function.busy_since = self.now
        function.cold += bool(self._missing(device, function)) or function.ready_at is not None

    def _missing(self, device: Device, function: FunctionState) -> set[str]:
        missing = {str(part) for part in PARTS} - function.there
        return missing if device.backbone_at is not None else missing | {"backbone"}

    def _load(self, device: Device, function: FunctionState, parts: set[str]) -> bool:
        """Begin to load what is missing of `parts`; False: there is no room for it."""
        times, model = self.times, function.model
        sizes = {
            "backbone": model.backbone_gb,
            "adapter": times.adapter_gb,
            "context": times.context_gb,
        }
        need = sum(sizes[part] for part in parts)
        if need > device.free_gb() and not (
            self.system.offloads and device.make_room(need, self._values(device), function)
        ):
            return False
        begin = self.now
        waits = len(function.queue)
        if "backbone" in parts:
            in_host = f"backbone {model.name}" in self._in_host
            device.backbone_at = begin = begin + times.load_s(model.backbone_gb, in_host)
            self.load_s["backbone"] += waits * (begin - self.now)
        elif device.backbone_at is not None:
            begin = max(begin, device.backbone_at)
        if "context" in parts:
            warm = f"libraries {function.name}" in self._in_host
            libraries_s = times.fork_s if warm else times.libraries_s
            begin += libraries_s + times.context_s
            self.load_s["libraries"] += waits * libraries_s
            self.load_s["context"] += waits * times.context_s
        if "adapter" in parts:
            took = times.load_s(times.adapter_gb, f"adapter {function.name}" in self._in_host)
            begin += took
            self.load_s["adapter"] += waits * took
        function.there |= parts & set(PARTS)
        function.ready_at = begin
        self._push(begin, "loaded", function)
        return True

    def _values(self, device: Device) -> dict[str, float]:
        return {f.name: f.seen.predicted_rate(self.now) for f in device.functions}

    def _schedule(self, device: Device) -> None:
        """Begin the loads and the prefill that can begin now, and note when to look again."""
        if not self.system.always_on:
            for function in device.functions:
                missing = self._missing(device, function)
                if function.queue and function.ready_at is None and missing:
                    self._load(device, function, missing)
        if device.prefill is None:
            self._start_prefill(device)
        device.version += 1
        following = device.next_event()
        if following < float("inf"):
            self._push(following, "device", (device, device.version))

    def _start_prefill(self, device: Device) -> None:
        """Give the device to the batch of least margin among those that may leave."""
        waiting, later = {}, float("inf")
        for function in device.functions:
            if not function.queue or function.ready_at is not None:
                continue
            if self._missing(device, function):
                continue
            largest = self._largest(function)
            count = min(len(function.queue), largest)
            leaves = self._leaves(function, largest)
            if leaves > self.now + EPSILON:
                later = min(later, leaves)
                continue
            room = int((device.free_gb() + EPSILON) / function.model.kv_gb)
            if room < count and self.system.offloads:
                need = count * function.model.kv_gb
                if device.make_room(need, self._values(device), function):
                    room = count
            if min(room, count) > 0:
                waited = self.now - function.queue[0].arrival
                run_s = function.model.prefill.seconds(min(room, count))
                slo_s = function.model.slo_s
                contender = turns.Contender(function.name, slo_s, waited, run_s)
                waiting[function.name] = contender, function, min(room, count)
        if waiting:
            first = turns.in_turn([contender for contender, _, _ in waiting.values()])[0]
            _, function, count = waiting[first.name]
            device.start(function, count)
        elif later < float("inf"):
            self._push(later, "wake", device.functions[0])

    def _largest(self, function: FunctionState) -> int:
        if self.system.fixed_batch:
            return self.system.fixed_batch[0]
        model = function.model
        return batching.largest_batch(model.prefill, model.slo_s, model.largest_batch)

    def _leaves(self, function: FunctionState, largest: int) -> float:
        arrivals = [request.arrival for request in function.queue[:largest]]
        if self.system.fixed_batch:
            size, wait_s = self.system.fixed_batch
            return arrivals[-1] if len(arrivals) >= size else arrivals[0] + wait_s
        model = function.model
        return batching.leaves_at(model.prefill, model.slo_s, largest, arrivals, self.now)

    def _plan(self, device: Device) -> None:
        """Pre-load what the plan says, and let go what is idle and in no plan."""
        wanted = self._wanted(device) if self.system.preloads else set()
        for function in device.functions:
            idle = not device.runs(function) and function.ready_at is None
            old = self.now - function.last_used > self.times.keep_alive_s
            if idle and old:
                function.there &= {p for p in PARTS if f"{p} {function.name}" in wanted}
        name = f"backbone {device.model.name}"
        unused = not any(device.runs(f) or f.there or f.ready_at for f in device.functions)
        if unused and name not in wanted and device.backbone_at is not None:
            device.drop_backbone()
        for function in device.functions:
            parts = {p for p in PARTS if f"{p} {function.name}" in wanted} - function.there
            if name in wanted and device.backbone_at is None:
                parts |= {"backbone"}
            if parts and function.ready_at is None and not device.runs(function):
                self._load(device, function, parts)

    def _wanted(self, device: Device) -> set[str]:
        """Return names of what should be on the device; note what should be in host memory."""
        artifacts = self._known[device.functions[0].name]
        values, room = self._values(device), int(_GB * (self.times.device_gb - device.running_gb()))
        asked = tuple(values.items()), room
        if self._planned.get(device.functions[0].name, ((), []))[0] != asked:
            host = self.times.host_gb / len(self.devices)
            places = [Place("host", int(host * _GB), False), Place("device", room, True)]
            made = preload.plan(artifacts, values, places)
            self._planned[device.functions[0].name] = asked, made
        loads = self._planned[device.functions[0].name][1]  # the same where nothing has changed
        self._in_host -= {artifact.name for artifact in artifacts}
        self._in_host |= {load.artifact for load in loads if load.place == "host"}
        return {load.artifact for load in loads if load.place == "device"}

    def _backbone(self, model: Model, functions: list[FunctionState]) -> Artifact:
        slow = self.times.load_s(model.backbone_gb, False)
        return Artifact(
            f"backbone {model.name}",
            int(model.backbone_gb * _GB),
            tuple(f.name for f in functions),
            host_s=slow - self.times.load_s(model.backbone_gb, True),
            device_s=slow,
        )

    def _artifacts(self, function: FunctionState) -> list[Artifact]:
        times, name = self.times, function.name
        slow, fast = (times.load_s(times.adapter_gb, there) for there in (False, True))
        libraries, adapter = f"libraries {name}", f"adapter {name}"
        needs = (libraries, f"backbone {function.model.name}")
        return [
            Artifact(libraries, int(times.libraries_gb * _GB), (name,), times.libraries_s),
            Artifact(adapter, int(times.adapter_gb * _GB), (name,), slow - fast, slow, needs),
            Artifact(
                f"context {name}",
                int(times.context_gb * _GB),
                (name,),
                device_s=times.context_s,
                requires=(adapter,),
            ),
        ]


def _groups(
    system: System, times: Times, functions: list[FunctionState]
) -> list[list[FunctionState]]:
    """Return the functions of each device: each alone, or those of a model over its copies."""
    if not system.shares:
        return [[function] for function in functions]
    models = dict.fromkeys(function.model.name for function in functions)
    of = [[f for f in functions if f.model.name == name] for name in models]
    copies = times.devices_per_model
    return [group[i::copies] for group in of for i in range(copies) if group[i::copies]]
