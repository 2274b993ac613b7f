"""A caller arrives at a function with its limits and without its key."""

import base64

import pytest

from serving.functions.callers import CallerRing, token_of
from serving.http.access.keys import Caller, KeyRing
from serving.http.settings import HttpSettings, KeyLimits, Tenant


def test_a_caller_keeps_its_limits_and_shares_its_tokens(tmp_path):
    limits = KeyLimits(max_running=2, max_waiting=3, tokens_per_minute=60)
    tenant = Tenant("secret", id="a", weight=2.0, limits=limits)
    front = KeyRing(HttpSettings(tenants=(tenant,), budgets_folder=str(tmp_path)))
    caller = front.find("secret")
    assert caller is not None
    token = token_of(caller)
    assert b"secret" not in base64.urlsafe_b64decode(token)
    one, other = (CallerRing(str(tmp_path)).find(token) for _ in range(2))
    assert (one.share, one.salt, one.id) == (caller.share, caller.salt, "a")
    assert not one.is_admin
    one.budget.spend(1000)
    assert other.budget.wait_s() > 0
    ring = CallerRing(None)
    assert ring.find(token).budget is ring.find(token).budget


def test_nobody_else_may_use_the_model():
    ring = CallerRing(None)
    assert not ring.anonymous.uses_model
    for word in ("secret", base64.urlsafe_b64encode(b"[]").decode(), ""):
        assert ring.check(word) == (None, "unknown")
    caller = ring.find(token_of(Caller()))
    assert caller is not None
    assert caller.uses_model
    assert caller.budget is None


@pytest.mark.parametrize("rate", [None, 5.0])
def test_a_changed_rate_is_a_new_budget(rate):
    ring, old = CallerRing(None), ring_caller(7.0)
    first = ring.find(token_of(old)).budget
    budget = ring.find(token_of(ring_caller(rate))).budget
    assert (budget and budget.per_minute) == rate
    assert budget is not first


def ring_caller(per_minute: float | None) -> Caller:
    """Return a caller of one id with so many tokens a minute."""
    limits = KeyLimits(tokens_per_minute=None if per_minute is None else int(per_minute))
    ring = KeyRing(HttpSettings(tenants=(Tenant("k", id="a", limits=limits),)))
    caller = ring.find("k")
    assert caller is not None
    return caller
