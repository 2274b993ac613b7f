"""An instance takes over adapters while its server is lost, and lets go of them afterwards."""

import numpy as np
import pytest

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ModuleReport, SiteWeights
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.loading.local_experts import LocalExperts
from serving.lora_server.shards import ShardLayout, SplitWeights, split


class Loader:
    """Two places; what is asked for is there at the second time."""

    def __init__(self):
        self.kept, self.slots, self.loading, self.in_use = {}, {}, set(), []

    def retain(self, entry):
        self.kept[entry.digest] = entry

    def drop(self, digest):
        del self.kept[digest]
        self.slots.pop(digest, None)

    def acquire(self, digest):
        assert digest in self.kept
        if digest in self.slots:
            self.loading.discard(digest)
            self.in_use.append(digest)
            return self.slots[digest]
        self.slots[digest] = len(self.slots)
        self.loading.add(digest)
        return None

    def release(self, digest):
        self.in_use.remove(digest)

    def is_loading(self, digest):
        return digest in self.loading

    def is_placed(self, digest):
        return digest in self.slots

    def can_place(self, weights):
        assert weights.sites
        return len(self.slots) < 2


def entry(name: str, module: str = "experts.up_proj") -> AdapterEntry:
    site = SiteWeights(np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), 1.0)
    modules = {m: ModuleReport((0,), (2,), (1.0,)) for m in (module, "q_proj")}
    report = AdapterReport(
        AdapterKind.LORA, name, f"sha of {name}", {}, 8, 8, modules, 2, 2, None, None
    )
    plan = ShardLayout(ServerLayout(AdapterShape(1, 1, 1, 1), 1, 1), (0,))
    weights = split(AdapterWeights({(m, 0): site for m in modules}, report), plan)
    return AdapterEntry(
        name=name,
        kind=AdapterKind.LORA,
        digest=weights.digest,
        generation=1,
        weights=weights,
        pinned=False,
        path=name,
    )


@pytest.fixture
def loader():
    return Loader()


@pytest.fixture
def local(loader):
    made = LocalExperts(loader)
    yield made
    made.check_integrity()


def test_the_whole_adapter_goes_by_a_digest_of_its_own_and_counts_all_its_bytes():
    weights = entry("a").weights
    assert isinstance(weights, SplitWeights)
    assert [name for name, _ in weights.sites] == ["q_proj"]
    assert len(weights.whole.sites) == 2
    assert weights.whole.digest != weights.digest == "sha of a"
    assert weights.report.weight_bytes == 8
    assert not isinstance(entry("b", "v_proj").weights, SplitWeights)


def test_an_adapter_is_loaded_when_it_is_needed_and_kept_until_the_server_is_back(local, loader):
    one = entry("a")
    local.retain(one)
    local.retain(one)
    assert not loader.kept
    assert local.can_serve(one.digest)
    assert local.acquire(one.digest) is None
    assert local.is_loading(one.digest)
    assert local.acquire(one.digest) == 0
    assert (local.users(one.digest), local.stands_in(one.digest)) == (1, True)
    local.release(one.digest)
    assert (local.users(one.digest), local.stands_in(one.digest)) == (0, False)
    local.collect()
    assert loader.kept
    local.drop(one.digest)
    assert not local.is_busy
    local.drop(one.digest)
    assert local.is_busy
    assert not local.knows(one.digest)
    local.collect()
    assert not loader.kept
    assert not local.is_busy


def test_there_is_only_so_much_room(local):
    entries = [entry(name) for name in "abc"]
    for one in entries:
        local.retain(one)
    for one in entries[:2]:
        local.acquire(one.digest)
    assert [local.can_serve(one.digest) for one in entries] == [True, True, False]
    assert not local.can_serve("unknown")
    for one in entries:
        local.drop(one.digest)


def test_an_adapter_that_the_server_refuses_is_served_here_while_requests_want_it(local):
    one = entry("a")
    local.retain(one)
    local.serve_instead(one.digest)
    assert local.stands_in(one.digest)
    local.drop(one.digest)
    local.retain(one)
    assert not local.stands_in(one.digest)
    local.drop(one.digest)


def test_adapters_without_experts_are_none_of_its_business(local):
    one = entry("b", "v_proj")
    local.retain(one)
    assert not local.knows(one.digest)
    local.drop(one.digest)
