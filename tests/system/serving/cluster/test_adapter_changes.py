"""Several instances and one journal: after a change all have it, or none."""

import pytest
from support.doubles.fake_engine import FakeRegistry, write_fake_adapters

from serving.adapters.journal import Changes, Journal, Loaded, replay
from serving.cluster.adapter_changes import AdapterChanges


class Instance:
    """An instance's registry, and its way to follow the journal."""

    def __init__(self, number, root, journal):
        self.number, self.is_ready, self.is_there = number, True, True
        self.registry, self.journal, self.full = FakeRegistry(root), journal, False

    def load(self, name):
        entry = self.registry.load(name, name)
        self.journal.loaded(name, Loaded(name, entry.digest))

    def replay(self):
        if not self.is_there:
            raise ConnectionError("gone")
        if self.full:
            wanted = set(self.journal.read().loaded)
            return dict.fromkeys(wanted - set(self.names), "no room")
        return replay(self.journal.read(), self.registry)

    @property
    def names(self):
        return [entry.name for entry in self.registry.entries()]


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "state")


@pytest.fixture
def instances(tmp_path, journal):
    root = write_fake_adapters(tmp_path / "adapters", "sql", "law")
    return [Instance(number, root, journal) for number in range(2)]


@pytest.fixture
def changes(journal, instances):
    return AdapterChanges(journal, lambda: instances)


def test_an_instance_that_was_away_follows(changes, instances):
    """Before: 404 from it for ever."""
    before = changes.read()
    instances[1].is_there = False
    instances[0].load("sql")
    assert changes.agree(before)
    instances[1].is_there = True
    assert changes.repeat(instances[1]) == {}
    assert [one.names for one in instances] == [["sql"], ["sql"]]


def test_an_instance_that_did_otherwise_follows(changes, instances):
    """Before: 400 from one, which had it already, and 200 from the other."""
    instances[1].registry.load("sql", "sql")
    before = changes.read()
    instances[0].load("sql")
    assert changes.agree(before)
    assert [one.names for one in instances] == [["sql"], ["sql"]]


def test_a_change_that_one_cannot_follow_is_taken_back_everywhere(changes, instances):
    instances[0].load("law")
    assert changes.agree(Changes())
    before = changes.read()
    instances[1].full = True
    instances[0].load("sql")
    assert not changes.agree(before)
    assert [one.names for one in instances] == [["law"], ["law"]]
    assert list(changes.read().loaded) == ["law"]


def test_an_instance_that_starts_is_not_asked(changes, instances):
    instances[1].is_ready = False
    instances[0].load("sql")
    assert changes.agree(Changes())
    assert instances[1].names == []


def test_without_a_journal_there_is_nothing_to_repeat(instances):
    changes = AdapterChanges(None, lambda: instances)
    assert not changes.are_recorded
    assert changes.agree(changes.read())
    assert changes.repeat(instances[0]) == {}
