"""Keys lead to callers; the keys file says what tenants may do."""

import json
import struct
import time

import pytest

from serving.http.access.key_hash import new_key
from serving.http.access.keys import KeyRing, budget_of, main
from serving.http.settings import HttpSettings, KeyLimits, Tenant


def test_roles():
    ring = KeyRing(HttpSettings(api_keys=("u",), admin_keys=("a",), metrics_keys=("m",)))
    user, admin, metrics = (ring.find(key) for key in "uam")
    assert (user.uses_model, user.is_admin, user.reads_metrics) == (True, False, False)
    assert (admin.uses_model, admin.is_admin, admin.reads_metrics) == (True, True, True)
    assert (metrics.uses_model, metrics.is_admin, metrics.reads_metrics) == (False, False, True)
    assert ring.find("x") is None
    assert not ring.anonymous.uses_model
    assert not ring.anonymous.is_admin


def test_without_keys_everybody_may_do_everything():
    anonymous = KeyRing(HttpSettings()).anonymous
    assert anonymous.uses_model
    assert anonymous.is_admin
    assert anonymous.reads_metrics
    assert anonymous.salt == ""
    assert not KeyRing(HttpSettings(admin_keys=("a",))).anonymous.is_admin


def test_salts_differ_by_key_and_do_not_show_it():
    ring = KeyRing(HttpSettings(api_keys=("one-key", "two-key")))
    one, two = ring.find("one-key"), ring.find("two-key")
    assert one.salt != two.salt
    assert "key" not in one.salt


def test_a_hashed_key_leads_to_its_caller_between_its_times():
    clock = [100.0]
    keys = [new_key("team-a") for _ in range(3)]
    tenants = [
        Tenant(id="team-a", hash=keys[0][1], weight=2.0, rate=5.0),
        Tenant(id="team-a", hash=keys[1][1], weight=2.0, rate=5.0, not_before=200.0),
        Tenant(id="team-a", hash=keys[2][1], weight=2.0, rate=5.0, expires=150.0),
    ]
    ring = KeyRing(HttpSettings(tenants=tuple(tenants)), now=lambda: clock[0])
    found = [ring.check(key) for key, _ in keys]
    assert [why for _, why in found] == ["", "early", ""]
    one, other = found[0][0], found[2][0]
    assert (one.id, one.share.tenant, one.share.weight) == ("team-a", "team-a", 2.0)
    assert one.bucket is other.bucket, "two keys of one id had twice its rate"
    assert one.salt == other.salt
    clock[0] = 200.0
    assert [ring.check(key)[1] for key, _ in keys] == ["", "", "expired"]
    for wrong in (keys[0][0] + "x", keys[0][0][:-1], "team-b" + keys[0][0][6:], keys[0][1], ""):
        assert ring.check(wrong) == (None, "unknown")


def test_new_tenants_take_over_and_keep_the_counters_of_their_ids():
    (first, one), (second, two) = new_key("a"), new_key("a")
    ring = KeyRing(HttpSettings(tenants=(Tenant(id="a", hash=one, rate=1.0),)))
    before = ring.find(first)
    ring.set_tenants([Tenant(id="a", hash=two, rate=1.0)])
    assert ring.find(first) is None
    assert ring.find(second).bucket is before.bucket
    ring.set_tenants([Tenant(id="a", hash=two, rate=2.0)])
    assert ring.find(second).bucket.rate == 2.0
    with pytest.raises(ValueError, match="last key"):
        ring.set_tenants([])
    assert ring.find(second) is not None


def test_instances_share_a_keys_host_memory():
    limits = KeyLimits(max_adapters=3, max_adapter_bytes=100)
    settings = HttpSettings(api_keys=("k",), key_limits=limits, num_instances=2)
    share = KeyRing(settings).find("k").host_share
    assert (share.max_adapters, share.max_bytes) == (2, 50)


def test_limits_of_a_key_stand_over_those_of_all():
    settings = HttpSettings(
        api_keys=("u",),
        admin_keys=("root",),
        tenants=(Tenant("t", limits=KeyLimits(max_running=9)), Tenant("v", id="v")),
        key_limits=KeyLimits(max_running=2, max_waiting=3, tokens_per_minute=60, max_adapters=4),
    )
    ring = KeyRing(settings)
    user, tenant, named, admin = (ring.find(key) for key in ("u", "t", "v", "root"))
    assert [c.id for c in (user, tenant, named, admin)] == [
        "api-key-1",
        "tenant-1",
        "v",
        "admin-key-1",
    ]
    assert (user.share.max_running, tenant.share.max_running) == (2, 9)
    assert tenant.share.max_waiting == named.share.max_waiting == 3
    assert tenant.budget is not user.budget
    assert tenant.host_share.max_adapters == 4
    assert admin.share.max_running is admin.budget is None
    with pytest.raises(ValueError, match="need --api-key"):
        HttpSettings(key_limits=KeyLimits(max_running=2))


def test_roles_of_the_keys_file():
    tenants = [Tenant(key=r, id=r, roles=frozenset({r})) for r in ("user", "admin", "metrics")]
    ring = KeyRing(HttpSettings(tenants=tuple(tenants), enable_runtime_lora=True))
    rights = [
        (c.uses_model, c.is_admin, c.reads_metrics)
        for c in map(ring.find, ("user", "admin", "metrics"))
    ]
    assert rights == [(True, False, False), (True, True, True), (False, False, True)]


def test_the_command_makes_a_key_and_its_line(capsys):
    assert main(["new", "team-a"]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    line = json.loads(out)
    ring = KeyRing(HttpSettings(tenants=(Tenant(id=line["id"], hash=line["hash"]),)))
    assert ring.find(key).id == "team-a"
    assert key.partition(".")[2] not in out
    assert main(["new", "a b"]) == main([]) == 2


def test_a_budget_that_processes_share_has_a_clock_of_all_hosts(tmp_path):
    """Hosts that share a folder have been up for different times."""
    assert budget_of("a", 60, str(tmp_path)).wait_s() == 0.0
    (file,) = tmp_path.iterdir()
    _, seen = struct.unpack("=dd", file.read_bytes())
    assert time.time() - 600 < seen <= time.time()
