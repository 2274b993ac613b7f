"""An adapter counts as in use while a caller holds its entry and has no request yet."""

import gc

from support.cases.host_entries import entry

from lora_jax.adapters.host_memory.lent_entries import LentEntries


def test_an_entry_counts_until_it_goes_or_is_given_back():
    lent, kept = LentEntries(), entry("a", "d", 1)
    one, two = lent.lend(kept), lent.lend(kept)
    assert (one.name, one.weights) == ("a", kept.weights)
    assert lent.digests() == {"d"}
    lent.give_back(one)
    lent.give_back(one)
    lent.give_back(kept)  # which was not lent
    assert lent.digests() == {"d"}
    del two
    gc.collect()
    assert lent.digests() == frozenset()
    assert not lent._loans
