"""Device, residencies, turns and registry of an engine's loop, which answer at once."""

from types import SimpleNamespace

from lora_jax.adapters.host_memory.room_line import RoomLine
from serving.api.request import (
    SequenceResult,
)
from serving.steps.sampling.sampler import INVALID_TOKEN


class Runner:
    """Gives token 70 to everyone; `trouble` is called with each plan before it runs."""

    def __init__(self):
        self.slots, self.trouble, self.bad_prompts = None, lambda plan: None, set()
        self.order, self.status, self.asked_cold, self.has_cold = [], None, 0, False
        self.waits = False

    def run_cold(self):
        self.asked_cold += 1
        if self.has_cold:
            self.order.append("cold")
        self.has_cold = False
        return False

    def dispatch(self, plan, masks_first):
        self.trouble(plan)
        self.order.append("short" if plan.is_short else "dispatch")
        return SimpleNamespace(plan=plan, remote_status=self.status, waits=self.waits)

    def read(self, step):
        self.order.append("read")
        return [self._result(chunk) for chunk in step.plan.chunks]

    def wait(self):
        self.order.append("wait")

    def close(self):
        self.order.append("freed")

    def _result(self, chunk):
        bad = chunk.sequence.request.prompt_ids in self.bad_prompts
        token = INVALID_TOKEN if bad else 70
        return SequenceResult(chunk, token if chunk.samples else None)


class NeverThere:
    """Adapters that never become resident."""

    is_busy = False

    def __init__(self):
        self.kept, self.slot, self.affected = 0, None, frozenset()
        self.here, self.asked = frozenset(), 0
        self.changes = None  # nothing is told of yet

    def acquire(self, digest):
        return self.slot

    def is_loading(self, digest):
        return False

    def is_resident(self, digest):
        return self.slot is not None

    def protect(self, digests):
        pass

    def pool_of(self, digest):
        return None

    def retain(self, entry):
        self.kept += 1

    def drop(self, digest):
        self.kept -= 1

    def follow(self, changes):
        self.changes = changes

    def prepare(self, device, dispatched):
        pass

    def affected_by(self, status):
        return frozenset() if status is None else self.affected

    def servable_here(self, digests):
        self.asked += 1
        return self.here & digests

    def release(self, digest):
        pass

    def check_integrity(self):
        assert self.kept == 0

    def rest(self):
        pass

    def close(self):
        pass


class Turns:
    """Turns that are always there; `order` is told of what the loop does with them."""

    def __init__(self, order, *, is_due):
        self._order, self.is_due = order, is_due

    def take(self, arrivals, closing):
        self._order.append("taken")

    def take_idle(self, woken):
        return False

    def look(self):
        pass

    def dispatched(self):
        pass

    def pass_on(self):
        self._order.append("passed on")

    def give_back(self):
        self._order.append("given back")

    def close(self):
        self._order.append("closed")

    def ran(self, num_prompts, began, ended):
        pass


class Registry:
    def __init__(self):
        self.generation, self.names, self.line = 0, [], RoomLine()

    def take_changes(self):
        return [(name, SimpleNamespace(name=name)) for name in self.names]
