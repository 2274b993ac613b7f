"""Slots and rows of adapters: a random walk against a simple model, and the rules one by one."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.cases import adapter_cases as cases

from lora_jax.adapters import lora_allocator
from lora_jax.adapters.lora_allocator import SlotAllocator

CATALOGUE = cases.llama(hidden=8, inner=6, vocab=10)
SLOTS = 3
ROWS = {4: 30, 6: 12, 8: 60, 10: 4}
NAMES = (("q_proj",), ("k_proj", "v_proj"), ("q_proj", "gate_proj", "down_proj"), ("lm_head",))
ADAPTERS = {
    f"{rank}.{kind}": cases.weights(CATALOGUE, rank, kind, f"{rank}.{kind}", names)
    for rank in (1, 2, 4, 9)
    for kind, names in enumerate(NAMES)
}


def allocator() -> SlotAllocator:
    return SlotAllocator(CATALOGUE, SLOTS, ROWS)


class Residency(RuleBasedStateMachine):
    """The allocator against a dict per adapter, in order of last use."""

    def __init__(self):
        super().__init__()
        self.allocator = allocator()
        self.model: dict[str, dict] = {}
        self.rows: dict[str, set] = {}

    def placed(self, **wanted) -> list[str]:
        return [d for d, m in self.model.items() if all(m[k] == v for k, v in wanted.items())]

    def drop(self, digest: str) -> None:
        del self.model[digest], self.rows[digest]

    def touch(self, digest: str) -> None:
        self.model[digest] = self.model.pop(digest)

    @rule(digest=st.sampled_from(sorted(ADAPTERS)), pinned=st.booleans())
    def place(self, digest, pinned):
        weights = ADAPTERS[digest]
        before = self.allocator.stats()
        can, has_room = self.allocator.can_place(weights), self.allocator.has_room(weights)
        assert self.allocator.stats() == before
        idle = self.placed(loading=False, pinned=False, users=0)
        victims = None if digest in self.model else self.fewest_victims(weights, idle)
        assert can == (victims is not None)
        assert has_room == (victims == [])
        if victims is None:
            with pytest.raises(ValueError, match=r"slot already|no room"):
                self.allocator.place(weights, pinned=pinned)
            assert self.allocator.stats() == before
            return
        placement = self.allocator.place(weights, pinned=pinned)
        assert list(placement.evicted) == victims
        evicted_slots = {self.model[d]["slot"] for d in placement.evicted}
        assert evicted_slots - {placement.slot} <= set(placement.cleared_slots)
        for victim in placement.evicted:
            self.drop(victim)
        assert placement.slot not in {m["slot"] for m in self.model.values()}
        self.model[digest] = {
            "slot": placement.slot, "loading": True, "pinned": pinned, "users": 0, "retired": False,
        }  # fmt: skip
        self.rows[digest] = self.check_placement(weights, placement)

    def fewest_victims(self, weights, idle) -> list[str] | None:
        """Return the least recently used idle ones without which it fits, first fit by hand."""
        for count in range(len(idle) + 1):
            held = [d for d in self.model if d not in idle[:count]]
            taken = set().union(*(self.rows[d] for d in held))
            if len(held) < SLOTS and self.first_fit(weights, taken):
                return idle[:count]
        return None

    @staticmethod
    def first_fit(weights, taken) -> bool:
        taken = set(taken)
        for width, length in weights.demand:
            gaps = (
                {(width, row) for row in range(start, start + length)}
                for start in range(ROWS[width] - length + 1)
            )
            rows = next((gap for gap in gaps if not gap & taken), None)
            if rows is None:
                return False
            taken |= rows
        return True

    def check_placement(self, weights, placement) -> set:
        """Return the rows it owns, after checking that nobody else does."""
        rows = {
            (width, row)
            for width, writes in placement.writes.items()
            for write in writes
            for row in range(write.offset, write.offset + len(write.rows))
        }
        assert len(rows) == sum(weights.rows_by_width().values())
        assert all(row < ROWS[width] for width, row in rows)
        for other in self.rows.values():
            assert not rows & other
        return rows

    @precondition(lambda self: self.placed(loading=True))
    @rule(data=st.data(), abandon=st.booleans())
    def end_loading(self, data, abandon):
        digest = data.draw(st.sampled_from(self.placed(loading=True)))
        call = self.allocator.abandon_loading if abandon else self.allocator.finish_loading
        assert call(digest) == self.model[digest]["slot"]
        if abandon or self.model[digest]["retired"]:
            self.drop(digest)
        else:
            self.model[digest]["loading"] = False

    @precondition(lambda self: self.placed(loading=False))
    @rule(data=st.data())
    def acquire(self, data):
        digest = data.draw(st.sampled_from(self.placed(loading=False)))
        assert self.allocator.acquire(digest) == self.model[digest]["slot"]
        self.model[digest]["users"] += 1
        self.touch(digest)

    @precondition(lambda self: any(m["users"] for m in self.model.values()))
    @rule(data=st.data())
    def release(self, data):
        digest = data.draw(st.sampled_from([d for d, m in self.model.items() if m["users"]]))
        self.allocator.release(digest)
        self.model[digest]["users"] -= 1
        self.touch(digest)
        if self.model[digest]["retired"] and not self.model[digest]["users"]:
            self.drop(digest)

    @rule(digest=st.sampled_from(sorted(ADAPTERS)))
    def retire(self, digest):
        self.allocator.retire(digest)
        if digest in self.model:
            self.model[digest]["retired"] = True
            if not self.model[digest]["users"] and not self.model[digest]["loading"]:
                self.drop(digest)

    @rule(digest=st.sampled_from(sorted(ADAPTERS)))
    def restore(self, digest):
        self.allocator.restore(digest)
        if digest in self.model:
            self.model[digest]["retired"] = False

    @rule(digest=st.sampled_from(sorted(ADAPTERS)), pinned=st.booleans())
    def pin(self, digest, pinned):
        if digest in self.model:
            self.allocator.pin(digest, pinned)
            self.model[digest]["pinned"] = pinned

    @invariant()
    def agrees(self):
        self.allocator.check_integrity()
        assert list(self.allocator.resident()) == self.placed(loading=False)
        for digest in ADAPTERS:
            known = self.model.get(digest)
            ready = known is not None and not known["loading"]
            assert self.allocator.slot_of(digest) == (known["slot"] if ready else None)
            assert self.allocator.is_loading(digest) == (known is not None and known["loading"])
            assert self.allocator.users(digest) == (known["users"] if known else 0)
        stats = self.allocator.stats()
        assert stats.slots_used == len(self.model)
        held = set().union(*self.rows.values())
        assert stats.rows_used == {w: sum(r[0] == w for r in held) for w in ROWS}
        assert stats.bytes_used == 4 * sum(w for w, _ in held)


Residency.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestResidency = Residency.TestCase


def ready(slots: SlotAllocator, weights) -> int:
    """Place and finish loading."""
    slots.place(weights)
    return slots.finish_loading(weights.digest)


def test_placement_says_where_every_matrix_is():
    catalogue = cases.moe()
    weights = cases.weights(catalogue, 3)
    slots = SlotAllocator(catalogue, 2, dict.fromkeys(catalogue.widths, 200))
    ready(slots, cases.weights(catalogue, 2, seed=1))
    placement = slots.place(weights)
    pools = {w: np.full((200, w), np.nan, np.float32) for w in catalogue.widths}
    for width, writes in placement.writes.items():
        for write in writes:
            pools[width][write.offset : write.offset + len(write.rows)] = write.rows
    for (name, layer), site in weights.sites.items():
        at = catalogue.module_names.index(name), layer
        a_offset, b_offset, rank, a_stride, b_stride = placement.entries[at]
        assert placement.scaling[at] == np.float32(site.scaling)
        experts = range(max(catalogue.modules[name].num_experts, 1))
        for expert in experts:
            a = pools[site.a.shape[2]][a_offset + expert * a_stride :][:rank]
            b = pools[site.b.shape[2]][b_offset + expert * b_stride :][:rank]
            np.testing.assert_array_equal(a, site.a[expert])
            np.testing.assert_array_equal(b, site.b[expert])
    untouched = placement.entries[..., 2] == 0
    assert untouched.sum() == placement.entries.shape[0] * catalogue.num_layers - len(weights.sites)


def test_adapters_of_one_layout_have_tables_of_their_own(monkeypatch):
    monkeypatch.setattr(lora_allocator, "_MOST_FORMS", 1)
    alike, other = cases.weights(CATALOGUE, 1, 5, "alike", ("lm_head",)), ADAPTERS["2.0"]
    vars(alike)["site_columns"] = ADAPTERS["1.3"].site_columns  # as FileLayout has them
    slots = allocator()
    first = slots.place(ADAPTERS["1.3"])
    entries = first.entries.copy()
    slots.place(other)  # whose form takes the place of the first
    second = slots.place(alike)
    np.testing.assert_array_equal(first.entries, entries)
    np.testing.assert_array_equal(second.entries[..., 2:], entries[..., 2:])
    np.testing.assert_array_equal(second.scaling, first.scaling)
    starts = {tuple(placement.entries[..., :2].max((0, 1))) for placement in (first, second)}
    assert len(starts) == 2, "both begin at the same rows"


def test_adapters_in_use_pinned_or_loading_stay():
    slots = allocator()
    for kind, names in enumerate((("q_proj",), ("k_proj",), ("o_proj",))):
        slots.place(cases.weights(CATALOGUE, 1, kind, str(kind), names), pinned=kind == 0)
    assert not slots.can_place(ADAPTERS["1.0"])  # two are loading, one is pinned and loading
    for kind in range(3):
        slots.finish_loading(str(kind))
    slots.acquire("1")
    assert slots.place(ADAPTERS["1.0"]).evicted == ("2",)
    slots.finish_loading("1.0")
    slots.acquire("1.0")
    assert not slots.can_place(ADAPTERS["1.1"])
    assert slots.try_place(ADAPTERS["1.1"]) is None
    slots.release("1")
    assert slots.try_place(ADAPTERS["1.1"]).evicted == ("1",)
    assert slots.try_place(ADAPTERS["1.1"]) is None, "it is there"


def test_a_reload_gets_its_own_slot_while_the_old_is_in_use():
    slots = allocator()
    old, new = ADAPTERS["1.0"], ADAPTERS["2.0"]
    old_slot = ready(slots, old)
    slots.acquire(old.digest)
    slots.retire(old.digest)
    new_slot = ready(slots, new)
    assert new_slot != old_slot
    assert slots.acquire(old.digest) == old_slot  # a second sequence of the same request
    slots.release(old.digest)
    assert slots.slot_of(old.digest) == old_slot
    slots.release(old.digest)
    assert slots.slot_of(old.digest) is None
    assert slots.take_cleared_slots() == (old_slot,)
    assert slots.take_cleared_slots() == ()
    slots.check_integrity()


def test_true_ranks_decide_how_many_fit():
    rank_one = {name: cases.weights(CATALOGUE, 1, 0, name, ("lm_head",)) for name in "abcd"}
    slots = SlotAllocator(CATALOGUE, 8, {8: 4, 10: 4})
    for weights in rank_one.values():
        assert not slots.place(weights).evicted
        slots.finish_loading(weights.digest)
    assert slots.stats().rows_used == {8: 4, 10: 4}
    assert slots.place(cases.weights(CATALOGUE, 3, 0, "e", ("lm_head",))).evicted == ("a", "b", "c")


def test_an_adapter_that_can_never_fit():
    slots = allocator()
    with pytest.raises(ValueError, match="9 rank rows of width 10; the device has 4"):
        slots.check_fits(ADAPTERS["9.3"])
    slots.check_fits(ADAPTERS["4.3"])
    with pytest.raises(ValueError, match="no room"):
        slots.place(ADAPTERS["9.3"])
    with pytest.raises(ValueError, match="width 12; the device has 0"):
        slots.check_fits(cases.weights(cases.llama(), 1))


def test_calls_out_of_order_are_refused():
    slots = allocator()
    weights = ADAPTERS["1.0"]
    for call in (slots.acquire, slots.release, slots.finish_loading, slots.abandon_loading):
        with pytest.raises(ValueError, match=r"not (resident|in use|loading)"):
            call(weights.digest)
    slots.place(weights)
    with pytest.raises(ValueError, match="not resident"):
        slots.acquire(weights.digest)
    with pytest.raises(ValueError, match="has a slot already"):
        slots.place(weights)
    with pytest.raises(ValueError, match="has no slot"):
        slots.pin("none", True)
    with pytest.raises(ValueError, match="at least 1 slot"):
        SlotAllocator(CATALOGUE, 0, ROWS)
