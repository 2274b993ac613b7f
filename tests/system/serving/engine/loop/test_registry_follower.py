"""The device's side and metrics get what has changed in a registry, once."""

from types import SimpleNamespace

from support.cases import adapter_cases as cases

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry import AdapterEntry, AdapterRegistry, RegistryLimits
from serving.engine.loop.registry_follower import RegistryFollower


class Told:
    """Residencies and metrics that note what they are told."""

    def __init__(self):
        self.changes, self.series = [], set()
        self.add_adapter, self.remove_adapter = self.series.add, self.series.discard

    def follow(self, changes):
        self.changes.append([(name, None if e is None else e.digest) for name, e in changes])

    def take(self):
        changes, self.changes = self.changes, []
        return changes


def test_what_is_read_evicted_and_unloaded_is_told_once(tmp_path):
    for name in "abc":
        cases.write_adapter(tmp_path / name, cases.dense_tensors(seed=ord(name)))
    limits = RegistryLimits(max_in_memory=2)
    registry = AdapterRegistry(cases.llama(), lora_dir=tmp_path, limits=limits)
    told = Told()
    follower = RegistryFollower(registry, None, told, told)
    follower.follow()
    assert told.take() == [[]]
    digests = {name: registry.resolve(name).digest for name in "abc"}
    follower.follow()
    follower.follow()
    (changes,) = told.take()
    assert dict(changes) == {"a": None, "b": digests["b"], "c": digests["c"]}, "a was evicted"
    assert told.series == set("abc")
    registry.resolve("a")
    registry.unload("c")
    follower.follow()
    (changes,) = told.take()
    assert dict(changes) == {"a": digests["a"], "b": None, "c": None}
    assert told.series == {"a", "b"}, "what is evicted keeps its series"


def test_compositions_come_and_go_by_their_digests():
    asked, weights = [], cases.weights(cases.llama(), 2, seed=1)
    one, other = (
        AdapterEntry("a*1+b*1", AdapterKind.LORA, digest, 0, weights, False, "") for digest in "xy"
    )
    registry = SimpleNamespace(generation=0, take_changes=list, knows_digest="xy".__contains__)
    composed = SimpleNamespace(generation=1, kept=(one, other), keep_only=asked.append)
    composed.entries = lambda: composed.kept
    told = Told()
    follower = RegistryFollower(registry, composed, told, told)
    follower.follow()
    (changes,) = told.take()
    assert dict(changes) == {"x": "x", "y": "y"}, "two of one name"
    assert asked == [registry.knows_digest], "not all names: there may be thousands"
    composed.kept, registry.generation = (other,), 1
    follower.follow()
    composed.kept, registry.generation = (), 2
    follower.follow()
    registry.generation = 3
    follower.follow()
    assert told.take() == [[("x", None)], [("y", None)], []]
