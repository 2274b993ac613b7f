"""Eviction order of copies: least valuable first, never fixed ones, within the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_jax.adapters.host_memory.room import HostCopy, HostShare, least_valuable, make_room
from lora_jax.adapters.registry_errors import AdapterRejected, RegistryBusy

copies = st.lists(
    st.builds(
        HostCopy,
        digest=st.text("abcdefgh", min_size=1, max_size=3),
        num_bytes=st.integers(1, 50),
        last_use=st.integers(0, 99),
        value=st.sampled_from([0.0, 1.0, 2.5]),
        kept=st.booleans(),
        owner=st.sampled_from(["", "a", "b"]),
        fixed=st.booleans(),
    ),
    unique_by=(lambda c: c.digest, lambda c: c.last_use),
    max_size=12,
)


@given(copies, st.integers(-5, 200), st.integers(-2, 5))
def test_what_goes_is_enough_and_no_more_and_the_least_valuable(held, num_bytes, count):
    victims = least_valuable(held, num_bytes, count)
    order = {c.digest: (c.kept, c.value, c.last_use) for c in held}
    free = sorted((c for c in held if not c.fixed), key=lambda c: order[c.digest])
    if victims is None:
        assert sum(c.num_bytes for c in free) < num_bytes or len(free) < count
        return
    assert victims == free[: len(victims)]
    assert sum(c.num_bytes for c in victims) >= num_bytes
    assert len(victims) >= count
    fewer = victims[:-1]
    if victims:
        assert sum(c.num_bytes for c in fewer) < num_bytes or len(fewer) < count


@given(copies, st.integers(1, 60), st.sampled_from(["", "a"]), st.integers(1, 3))
def test_afterwards_every_limit_holds_or_nothing_goes(held, num_bytes, owner, most):
    share = HostShare(owner, max_adapters=most, max_bytes=80)
    try:
        gone = make_room(held, num_bytes, share, 100)
    except RegistryBusy:
        assert any(c.fixed for c in held), "everything could have gone"
        return
    left = [c for c in held if c.digest not in gone]
    assert sum(c.num_bytes for c in left) + num_bytes <= 100
    assert all(not c.fixed for c in held if c.digest in gone)
    own = [c for c in left if c.owner == owner]
    if owner:
        assert len(own) + 1 <= most
        assert sum(c.num_bytes for c in own) + num_bytes <= 80


def test_what_can_never_fit_is_no_matter_of_time():
    with pytest.raises(AdapterRejected, match="takes 9 bytes, the limit is max_total"):
        make_room([], 9, HostShare(), 8)
    with pytest.raises(AdapterRejected, match="takes 9 bytes, the limit is max_adapter_bytes=7"):
        make_room([], 9, HostShare("a", max_bytes=7), 80)


def test_a_count_of_copies_is_a_limit_too():
    held = [HostCopy(d, 1, last_use=n, value=float(n)) for n, d in enumerate("abc")]
    assert make_room(held, 1, HostShare(), 100, max_count=3) == {"a"}
    assert make_room(held, 0, HostShare(), 100, max_count=3) == set()  # it is there already
    assert make_room(held, 1, HostShare(), 100) == set()
    fixed = [HostCopy(d, 1, last_use=0, fixed=True) for d in "abc"]
    with pytest.raises(RegistryBusy):
        make_room(fixed, 1, HostShare(), 100, max_count=3)
